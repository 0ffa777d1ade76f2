"""What vLLM's flags of replicas mean together."""

from __future__ import annotations

import pytest

from modulm import LLM
from modulm.config import EngineConfig
from modulm.config.binding import share_of
from modulm.contracts.flags import flags_of
from modulm.errors import ConfigError
from modulm_fleet.flags import FleetConfig
from modulm_fleet.placement import placement


def placed(**flags: object) -> tuple[range, range, range, tuple[str, int]]:
    whole = ("headless", "nnodes", "node_rank", "master_addr", "prefill_replicas",
             "decode_replicas")  # fmt: skip
    given = {
        name if name in whole else f"data_parallel_{name}": value for name, value in flags.items()
    }
    found = placement(EngineConfig().with_parts(given))
    return found.here, found.served, found.elsewhere, found.address


HOME = ("127.0.0.1", 29550)


@pytest.mark.parametrize(
    ("flags", "here", "served", "elsewhere"),
    [
        ({}, range(1), range(1), 0),
        ({"size": 3}, range(3), range(3), 0),
        ({"size": 4, "size_local": 2}, range(2), range(4), 2),
        ({"size": 4, "size_local": 0}, range(0), range(4), 4),
        ({"size": 4, "size_local": 2, "start_rank": 2, "headless": True}, range(2, 4), range(0), 0),
        ({"size": 4, "start_rank": 3, "headless": True}, range(3, 4), range(0), 0),
        ({"size": 4, "nnodes": 2}, range(2), range(4), 2),
        ({"size": 4, "nnodes": 2, "node_rank": 1, "headless": True}, range(2, 4), range(0), 0),
        ({"size": 5, "nnodes": 2, "node_rank": 1, "headless": True}, range(3, 5), range(0), 0),
        ({"prefill_replicas": 1, "decode_replicas": 2}, range(3), range(3), 0),
        ({"size": 4, "rank": 3}, range(3, 4), range(3, 4), 0),
        ({"size": 4, "rank": 0, "external_lb": True}, range(1), range(1), 0),
        ({"size": 4, "size_local": 2, "start_rank": 2, "hybrid_lb": True}, range(2, 4),
         range(2, 4), 0),
    ],
)  # fmt: skip
def test_who_has_which_replica(
    flags: dict[str, object], here: range, served: range, elsewhere: int
) -> None:
    found = placed(**flags)
    assert found[:2] == (here, served)
    assert len(found[2]) == elsewhere
    assert found[3] == HOME


def test_where_others_announce_themselves() -> None:
    assert placed(size=2, address="10.0.0.7", rpc_port=99, master_addr="h")[3] == ("10.0.0.7", 99)
    assert placed(size=2, master_addr="10.0.0.8")[3] == ("10.0.0.8", 29550)


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"size": 2, "backend": "ray"}, "data_parallel_backend"),
        ({"size": 2, "external_lb": True}, "data_parallel_external_lb"),
        ({"size": 2, "rank": 2}, "data_parallel_rank"),
        ({"size": 2, "rank": 1, "headless": True}, "data_parallel_rank"),
        ({"prefill_replicas": 1}, "decode_replicas"),
        ({"decode_replicas": 1}, "prefill_replicas"),
        ({"prefill_replicas": 1, "decode_replicas": 1, "size": 2}, "data_parallel_size"),
        ({"prefill_replicas": 1, "decode_replicas": 1, "headless": True}, "headless"),
        ({"nnodes": 2}, "nnodes"),
        ({"size": 2, "nnodes": 2, "node_rank": 2}, "node_rank"),
        ({"size": 2, "nnodes": 2, "node_rank": 1}, "data_parallel_start_rank"),
        ({"size": 2, "size_local": 2, "start_rank": 1, "headless": True},
         "data_parallel_start_rank"),
        ({"size": 2, "size_local": 1, "headless": True}, "headless"),
        ({"size": 2, "size_local": 1, "start_rank": 1, "headless": True, "hybrid_lb": True},
         "headless"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused_by_its_name(
    flags: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        placed(**flags)
    assert caught.value.field == field


def test_the_flags_are_vllms() -> None:
    assert {"-dpn", "-dpr", "-dpa", "-dpp", "-dpb", "-dph", "-dpe", "-n", "-r"} <= {
        alias for spec in flags_of(FleetConfig) for alias in spec.aliases
    }


def test_an_offline_llm_has_no_replicas() -> None:
    with pytest.raises(ConfigError, match="LLM runs one replica"):
        LLM("demo", data_parallel_size=2)
    with pytest.raises(ConfigError, match="LLM runs one replica"):
        LLM("demo", prefill_replicas=1, decode_replicas=1)
    with pytest.raises(ConfigError, match="LLM starts no replicas on other machines"):
        LLM("demo", nnodes=2)


def test_a_worker_has_its_part_of_the_machine() -> None:
    flags = {"data_parallel_size_local": 3, "data_parallel_rank_local": 1,
             "tensor_parallel_size": 2}  # fmt: skip
    parallel = EngineConfig().with_parts(flags).parallel
    assert [share_of(parallel, rank) for rank in (0, 1)] == [(2, 6), (3, 6)]
    assert share_of(EngineConfig().parallel, 0) == (0, 1)
