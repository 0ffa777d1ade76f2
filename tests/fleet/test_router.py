"""Where requests are sent: by what replicas hold, and by how much they have to do."""

from __future__ import annotations

import random

import numpy as np
import pytest

from modulm.contracts.requests import Request
from modulm.contracts.sampling import PoolingParams, SamplingParams
from modulm.engine.kv_cache.prefix_index import Chain, hasher
from modulm.errors import EngineStalled
from modulm_fleet.prefixes import CachedPrefixes, PrefixHasher
from modulm_fleet.router import Router

BLOCK = 16


def asked(name: str, tokens: list[int], **fields: object) -> Request:
    return Request(id=name, prompt=tokens, params=SamplingParams(), **fields)  # type: ignore[arg-type]


def router(replicas: int = 4, capacity: int = 10_000, **options: object) -> Router:
    return Router(replicas, BLOCK, capacity, **options)  # type: ignore[arg-type]


def prompt(seed: int, length: int = 320) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def test_pieces_are_named_as_the_engines_blocks_are() -> None:
    request = asked("a", prompt(1), salt="s", adapter="poet")
    chain = Chain(request, BLOCK, hasher("sha256"))
    chain.extend(request.prompt.astype(np.int32))
    names, ends = PrefixHasher(BLOCK)(request)
    assert names[:8] == chain.names[:8]
    assert ends[:10] == [16, 32, 48, 64, 80, 96, 112, 128, 160, 192]
    assert len(names) == 8 + 6


def test_prompts_of_other_tenants_and_adapters_have_other_names() -> None:
    naming, tokens = PrefixHasher(BLOCK, "builtin"), prompt(1)
    found = [
        naming(asked("a", tokens, **fields))[0][0]
        for fields in ({}, {"salt": "s"}, {"salt": "t"}, {"adapter": "poet"})
    ]
    assert len(set(found)) == 4
    assert PrefixHasher(BLOCK)(asked("b", tokens))[0][0] == found[0]


def test_a_long_prompt_has_few_pieces() -> None:
    names, _ = PrefixHasher(BLOCK)(asked("a", prompt(1, 100_000)))
    assert len(names) < 90


def test_a_request_goes_where_its_prefix_lies() -> None:
    fleet = router()
    first = [fleet.send((asked(str(n), prompt(n)),)) for n in range(40)]
    assert set(first) == {0, 1, 2, 3}
    for n in range(40):
        fleet.record_end(str(n))
    again = [fleet.send((asked(f"b{n}", [*prompt(n), 5, 6]),)) for n in range(40)]
    assert again == first


@pytest.mark.parametrize(("waiting", "stays"), [(200, True), (400, False)])
def test_unless_another_replica_would_have_computed_it_sooner(waiting: int, stays: bool) -> None:
    fleet = router(2)
    place = fleet.send((asked("a", prompt(1, 321)),))
    fleet.record_end("a")
    fleet.disable(1 - place)
    fleet.send((asked("other", prompt(2, waiting - 16)),))
    fleet.enable(1 - place)
    assert (fleet.send((asked("b", prompt(1, 321)),)) == place) is stays


def test_what_is_computed_and_what_has_ended_weighs_nothing() -> None:
    fleet = router(2)
    place = fleet.send((asked("a", prompt(1)), asked("b", prompt(1))))
    assert fleet.loads[place] == 320 + 2 * 16
    fleet.record_tokens(1 - place, ["a"])
    assert fleet.loads[place] == 320 + 2 * 16
    fleet.record_tokens(place, ["b", "a", "unknown"])
    assert fleet.loads[place] == 2 * 16
    fleet.record_end("a")
    fleet.record_end("a")
    fleet.record_end("b")
    assert list(fleet.loads) == [0, 0]
    assert len(fleet) == 0
    assert fleet.replica("a") is None


def test_a_dead_replica_gets_nothing_and_is_known_to_hold_nothing() -> None:
    fleet = router(2)
    place = fleet.send((asked("a", prompt(1)),))
    assert fleet.remove(place) == ["a"]
    assert fleet.loads[place] == 0
    assert fleet.send((asked("a", prompt(1)),)) == 1 - place
    fleet.enable(place)
    fleet.record_end("a")
    assert fleet.send((asked("b", prompt(1)),)) == 1 - place
    fleet.remove(0), fleet.remove(1)
    with pytest.raises(EngineStalled):
        fleet.send((asked("c", prompt(1)),))


def test_a_cache_that_is_full_forgets_what_was_used_longest_ago() -> None:
    held, naming = CachedPrefixes(1, 640), PrefixHasher(BLOCK)
    old, new, third = (naming(asked("a", prompt(n))) for n in (1, 2, 3))
    for names, ends in (old, new, old, third):
        held.add(0, names, ends)
    assert all(held.holds(0, name) for name in (*old[0], *third[0]))
    assert not any(held.holds(0, name) for name in new[0])
    names, ends = naming(asked("b", prompt(4, 32)))
    held.add(0, names, ends)
    assert held.holds(0, old[0][0])
    assert not held.holds(0, old[0][-1])
    assert held.holders(old[0][-1]) is None


def test_front_ends_agree_where_a_new_prefix_belongs() -> None:
    one, two = router(8, shared=True), router(8, shared=True)
    for n in range(8):
        two.send((asked(f"x{n}", prompt(900 + n, 20)),))
    places = [(one.send((r := asked(str(n), prompt(n)),)), two.send((r,)), one.record_end(r.id),
               two.record_end(r.id)) for n in range(50)]  # fmt: skip
    assert sum(first == second for first, second, *_ in places) >= 40
    assert len({first for first, *_ in places}) == 8


def test_what_other_front_ends_sent_counts() -> None:
    fleet = router(2)
    fleet.record_load(0, 3)
    assert fleet.send((asked("a", prompt(1)),)) == 1
    fleet.record_load(0, 0)
    fleet.record_load(1, 1)
    assert list(fleet.loads) == [0, 320 + 16]


def test_what_reads_no_prefix_goes_where_least_is_to_do() -> None:
    fleet = router(2)
    place = fleet.send((asked("a", prompt(1)),))
    pooled = Request(id="b", prompt=prompt(1), params=PoolingParams())
    assert fleet.send((pooled,)) == 1 - place


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_the_books_are_right(seed: int) -> None:
    rng, fleet = random.Random(seed), router(5, 600, shared=bool(seed % 2))
    live: dict[str, int] = {}
    down: set[int] = set()
    for step in range(1500):
        act = rng.random()
        if act < 0.5 and len(down) < 5:
            tokens = prompt(rng.randrange(9), rng.randrange(1, 400))
            names = [f"{step}.{n}" for n in range(rng.choice((1, 1, 3)))]
            place = fleet.send([asked(name, tokens) for name in names])
            assert place not in down
            live |= dict.fromkeys(names, place)
        elif act < 0.6:
            fleet.record_tokens(
                place := rng.randrange(5), [n for n, at in live.items() if at == place]
            )
        elif act < 0.9 and live:
            name = rng.choice(list(live))
            fleet.record_end(name)
            del live[name]
        elif act < 0.95:
            place = rng.randrange(5)
            gone = fleet.remove(place)
            assert sorted(gone) == sorted(n for n, at in live.items() if at == place)
            live = {n: at for n, at in live.items() if at != place}
            down.add(place)
        elif down:
            fleet.enable(place := down.pop())
        assert all(fleet.replica(name) == place for name, place in live.items())
    for name in live:
        fleet.record_end(name)
    assert list(fleet.loads) == [0] * 5
    for place in range(5):
        assert fleet.prefixes._tokens[place] == sum(fleet.prefixes._pieces[place].values()) <= 600
        fleet.remove(place)
    assert len(fleet.prefixes) == 0


def engine_names(
    tokens: list[int], algorithm: str, root: bytes = b"", **fields: object
) -> list[bytes]:
    chain = Chain(asked("engine", tokens, **fields), BLOCK, hasher(algorithm), root)
    chain.extend(np.array(tokens, np.int32))
    return chain.names


def stored(
    tokens: list[int], names: list[bytes], extra: list[list[str] | None] | None = None
) -> list:
    """The event of a prompt's blocks, as an engine with these names publishes it."""
    hashes = [int.from_bytes(name[-8:], "big") for name in names]
    event = ["BlockStored", hashes, None, tokens[: BLOCK * len(names)], BLOCK, None, "GPU", None]
    return [*event, extra] if extra else event


def removed(names: list[bytes]) -> list:
    return ["BlockRemoved", [int.from_bytes(name[-8:], "big") for name in names], "GPU"]


@pytest.mark.parametrize(
    ("algorithm", "root"),
    [("sha256", b""), ("sha256_cbor", b""), ("builtin", b""), ("sha256", b"updated weights")],
)
def test_events_say_what_is_cached_whatever_the_engine_names_blocks(
    algorithm: str, root: bytes
) -> None:
    fleet, tokens = router(3, algorithm=algorithm), prompt(1)
    names = engine_names(tokens, algorithm, root)
    for replica in range(3):
        fleet.blocks.reset(replica, complete=True)
    # Sent by another front end, so nothing else tells this one.
    fleet.record_events(1, [stored(tokens[:160], names[:10])])
    fleet.record_events(2, [stored(tokens, names)])
    assert dict(fleet.blocks.cached(asked("a", tokens))) == {1: 160, 2: 320}
    assert fleet.send((asked("a", [*tokens, 7]),)) == 2
    assert fleet.loads[2] == 1 + 16
    fleet.record_end("a")
    fleet.record_events(2, [removed(names[4:5])])
    assert dict(fleet.blocks.cached(asked("a", tokens))) == {1: 160, 2: 64}
    assert fleet.send((asked("b", tokens),)) == 1
    fleet.record_events(1, [["AllBlocksCleared"]])
    fleet.record_events(2, [removed(names[:4] + names[5:])])
    assert not len(fleet.blocks)


def test_blocks_of_tenants_are_found_by_the_engines_hashes() -> None:
    fleet, tokens = router(2), prompt(1)
    names = engine_names(tokens, "sha256", salt="s")
    extra: list[list[str] | None] = [["digest"], *[None] * (len(names) - 1)]
    fleet.blocks.reset(1, complete=True)
    fleet.record_events(1, [stored(tokens, names, extra)])
    assert dict(fleet.blocks.cached(asked("a", tokens, salt="s"))) == {1: 320}
    assert not fleet.blocks.cached(asked("a", tokens))
    assert fleet.blocks.is_exact(1)
    # Other prompts show that this engine's hashes are its own: salted ones cannot be found.
    fleet.record_events(1, [stored(prompt(2), engine_names(prompt(2), "builtin"))])
    assert not fleet.blocks.is_exact(1)


def test_estimates_count_until_the_prompt_is_computed_or_while_events_are_missing() -> None:
    fleet, tokens = router(2), prompt(1)
    names = engine_names(tokens, "sha256")
    fleet.blocks.reset(0, complete=True), fleet.blocks.reset(1, complete=True)
    place = fleet.send((asked("a", tokens),))
    fleet.record_events(place, [stored(tokens[:16], names[:1])])
    assert fleet.prefixes.holds(place, names[7])  # it is on its way
    fleet.record_tokens(place, ["a"])
    fleet.record_events(place, [stored(tokens, names), removed(names)])
    assert len(fleet.prefixes) == 0
    # A gap: what is cached is not known, so what was sent counts again.
    fleet.blocks.reset(place, complete=False)
    fleet.record_end("a")
    fleet.disable(1 - place)
    fleet.send((asked("c", tokens),))
    fleet.enable(1 - place)
    fleet.record_tokens(place, ["c"])
    fleet.record_events(place, [stored(prompt(3), engine_names(prompt(3), "sha256"))])
    assert fleet.send((asked("d", tokens),)) == place
    fleet.record_events(place, [["AllBlocksCleared"]])
    assert fleet.blocks.is_exact(place)


def test_events_of_another_layout_are_refused() -> None:
    fleet = router(1, 160)
    with pytest.raises(ValueError, match="blocks of 32"):
        fleet.record_events(0, [["BlockStored", [1], None, [1] * 32, 32, None, "GPU"]])
    with pytest.raises(ValueError, match="Unknown"):
        fleet.record_events(0, [["Unknown", []]])
    tokens = prompt(1, 21 * BLOCK)
    event = stored(tokens, engine_names(tokens, "sha256"))
    with pytest.raises(ValueError, match="more than 20 blocks"):
        fleet.record_events(0, [event])
