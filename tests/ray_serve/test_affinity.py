"""Which replica a front sends a request to, without Ray."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from modulm_ray_serve.affinity import Affinity, Route, route

REPLICAS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "one": (0, ()),
    "two": (0, ()),
    "six": (0, ()),
}
SYSTEM = "You are a poet. " * 100


def affinity(shared: bool = False) -> Affinity:
    made = Affinity(8, shared)
    made.update(REPLICAS)
    return made


def asked(system: str = SYSTEM, adapter: str | None = None, **more: Any) -> Route:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Well?"}]
    return route({"model": "x", "messages": messages, **more}, adapter, b"")


def test_a_prompt_goes_where_its_beginning_lies() -> None:
    fleet = affinity()
    places = {}
    for number in range(12):
        one = asked(f"{number} {SYSTEM}")
        places[number] = fleet.choose(one)
        one.mark_answering()
        one.finish()
    assert set(places.values()) == set(REPLICAS)
    for number, place in places.items():
        again = asked(f"{number} {SYSTEM}", temperature=0.5)
        assert fleet.choose(again) == place
        again.finish()


def test_a_busy_replica_is_passed_over() -> None:
    fleet = affinity()
    first = asked()
    home = fleet.choose(first)
    first.mark_answering()
    assert {fleet.choose(asked()) for _ in range(5)} == {home}
    assert {fleet.choose(asked()) for _ in range(200)} == set(REPLICAS)


def test_an_adapter_stays_with_one_replica_whatever_it_is_asked() -> None:
    fleet = affinity()
    homes = {name: fleet.choose(asked("", name)) for name in "abcdef"}
    assert set(homes.values()) == set(REPLICAS)
    for name, home in homes.items():
        assert fleet.choose(asked(f"something else, {name} {SYSTEM}", name)) == home


def test_a_front_that_is_new_is_told_who_has_an_adapter() -> None:
    for home in REPLICAS:
        fleet = affinity()
        fleet.update({**REPLICAS, home: (1 << 20, ["poet"])})
        assert fleet.choose(asked(adapter="poet")) == home


def test_tenants_and_salts_are_kept_apart() -> None:
    body = {"prompt": SYSTEM}
    names = {
        tuple(made.names)
        for made in (
            route(body, None, b""), route(body, None, b"key"), route(body, "poet", b""),
            route({**body, "cache_salt": "s"}, None, b""),
        )
    }  # fmt: skip
    assert len(names) == 4
    assert route(body, None, b"").names == route({**body, "max_tokens": 3}, None, b"").names


def test_long_and_empty_prompts() -> None:
    assert route({}, None, b"").tokens == 0
    image = route({"messages": "x" * 5_000_000}, None, b"")
    assert image.tokens <= 1 << 16
    assert len(image.names) < 100


def test_replicas_come_and_go() -> None:
    fleet = affinity()
    fleet.update({"one": (0, ())})
    assert {fleet.choose(asked(str(n))) for n in range(9)} == {"one"}
    fleet.update({"one": (0, ()), "new": (0, ())})
    assert fleet.choose(asked("what is new")) == "new"  # the other has nine to do
    fleet.update({})
    assert fleet.choose(asked()) is None
    fleet.update({f"more {n}": (0, ()) for n in range(20)})  # more than there are places for
    assert fleet.choose(asked()) is not None


def test_a_dead_replica_gets_nothing_more() -> None:
    fleet = affinity()
    one = asked()
    first = fleet.choose(one)
    one.mark_dead()
    second = fleet.choose(one)
    assert second not in (None, first)
    one.mark_dead()
    third = fleet.choose(one)
    assert {first, second, third} == set(REPLICAS)
    one.mark_dead()
    assert fleet.choose(one) is None


def test_one_that_was_full_is_not_charged() -> None:
    fleet = affinity()
    one = asked()
    chosen = fleet.choose(one)
    (other, *_) = REPLICAS.keys() - {chosen}
    fleet.record_sent(one, other)
    assert one.replica == other
    assert sum(load > 0 for load in fleet._router.loads) == 1
    assert fleet.choose(asked("new")) != other
    one.finish()
    fleet.record_load(other, 500)
    assert {fleet.choose(asked(str(n))) for n in range(30)} == REPLICAS.keys() - {other}


def test_a_request_that_went_nowhere_leaves_nothing() -> None:
    fleet = affinity()
    for _ in range(50):
        one = asked()
        fleet.choose(one)
        fleet.choose(one)  # Ray Serve asks again while replicas are full
        one.finish()
    assert not fleet._router.loads[0]
    assert not any(fleet._router.loads)
    assert not len(fleet._router)


def test_the_replica_gets_no_names() -> None:
    one = asked()
    affinity().choose(one)
    sent = pickle.loads(pickle.dumps(one))
    assert (sent.names, sent.tokens, sent.affinity) == ([], 0, None)
    sent.mark_answering()
    sent.finish()
    sent.mark_dead()
