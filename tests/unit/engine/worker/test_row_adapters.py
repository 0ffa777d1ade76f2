"""Adapters by row, and blocks that a connector moves, on a real runner."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from modulm.config import EngineConfig
from modulm.contracts.connector import BlockTransfer, TransferPlan
from modulm.contracts.executor import Plan, RowStart
from modulm.contracts.sampling import SamplingParams
from modulm.engine.worker.model_runner import ModelRunner
from modulm.errors import EngineError
from modulm.plugins import manager
from modulm.testing.adapters import FakeAdapters
from modulm.testing.checkpoints import make_tiny
from modulm.testing.connectors import FakeConnector
from modulm.testing.runners import open_runner
from modulm_adapters.step.values import AdapterRow

PARAMS = SamplingParams(temperature=0.0, logprobs=4, prompt_logprobs=2)
PROMPTS = {0: [5, 99, 7, 300, 2, 41], 1: [17, 8, 8], 2: [100, 101, 102, 103]}
ADAPTERS = {0: None, 1: "a", 2: "b"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("adapters") / "tiny")


def new_runner(folder, tables=None, connector=None, **flags) -> ModelRunner:
    plugins = manager.PluginManager()
    plugins.register("adapters", "fake", FakeAdapters)
    config = EngineConfig.from_keywords(
        model=str(folder), max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64,
        num_gpu_blocks_override=33, dtype="float32", plugin_config=tables or {}, **flags,
    )  # fmt: skip
    return open_runner(config, plugins, connector=connector)


@pytest.fixture(scope="module", params=[False, True], ids=["together", "batch_invariant"])
def runner(folder, tmp_path_factory, request):
    tables = {"adapters": {"fake": {"slots": 2}}}
    runner = new_runner(folder, tables, batch_invariant=request.param)
    bank = runner.parts["adapters"].bank
    for seed, name in enumerate("abc"):
        torch.manual_seed(seed)
        path = tmp_path_factory.mktemp("bank") / f"{name}.safetensors"
        save_file({
            f"{layer}.{side}": 0.3 * torch.randn(held.shape[1:])
            for layer, pair in bank.layers.items()
            for side, held in (("down", pair.down), ("up", pair.up))
        }, path)  # fmt: skip
        bank.add(name, path)
    return runner


def step(runner, rows, adapters, fill=(), **more):
    """Admit rows, run their prompts in one step and let them go: row -> (token, logprobs)."""
    prompts = [PROMPTS[row] for row in rows]
    arrays = [np.array(prompt) for prompt in prompts]
    plan = Plan(
        step=0,
        rows=np.array(rows, dtype=np.int32),
        starts=np.zeros(len(rows), dtype=np.int32),
        counts=np.array([len(prompt) for prompt in prompts], dtype=np.int32),
        tokens=np.concatenate(arrays),
        tables=tuple(_tables(rows) for _ in runner.capacity.groups),
        samples=np.ones(len(rows), dtype=bool),
        admit=tuple(
            RowStart(row, f"r{row}", PARAMS, array, np.zeros(0, np.int64), 0,
                     parts=used(adapters.get(row)))
            for row, array in zip(rows, arrays, strict=True)
        ),
        parts={"adapters": tuple(fill)} if fill else {},
        **more,
    )  # fmt: skip
    result = runner.run(plan)
    runner.run(nothing(release=tuple(rows)))
    return {
        row: (token, result.logprobs[row][0].values, result.prompt_logprobs[row][-1].values)
        for row, token in zip(rows, result.tokens.tolist(), strict=True)
    }


def used(adapter: str | None) -> dict[str, AdapterRow]:
    return {} if adapter is None else {"adapters": AdapterRow(adapter)}


def nothing(**more) -> Plan:
    none = np.zeros(0, dtype=np.int32)
    return Plan(0, none, none, none, np.zeros(0, np.int64), (), np.zeros(0, bool), **more)


def _tables(rows) -> np.ndarray:
    return (1 + 4 * np.array(rows)[:, None] + np.arange(4)).astype(np.int32)


def close(one, other) -> bool:
    return one[0] == other[0] and all(
        np.allclose(a, b, atol=1e-4) for a, b in zip(one[1:], other[1:], strict=True)
    )


def test_each_row_of_a_step_has_its_own_adapter(runner) -> None:
    assert runner.capacity.parts["adapters"] == {"slots": 2}
    mixed = step(runner, [0, 1, 2], ADAPTERS, fill=[(1, "a"), (2, "b")])
    plain = step(runner, [0, 1, 2], {})
    assert close(mixed[0], plain[0])
    assert not close(mixed[1], plain[1])
    for row in PROMPTS:
        assert close(step(runner, [row], ADAPTERS)[row], mixed[row])


def test_a_slot_that_is_filled_anew_is_no_longer_the_old_adapter(runner) -> None:
    before = step(runner, [1], {1: "a"}, fill=[(1, "a")])[1]
    other = step(runner, [1], {1: "c"}, fill=[(1, "c")])[1]
    assert not close(before, other)
    assert close(step(runner, [1], {1: "a"}, fill=[(2, "a")])[1], before)


def test_what_runs_between_steps_is_the_model_itself(runner) -> None:
    """The check after a failed step has one token, whatever the step before had."""
    plain = runner.check()
    step(runner, [0, 1, 2], ADAPTERS, fill=[(1, "a"), (2, "b")])
    assert runner.check() == plain
    assert runner.parts["adapters"].bank.current is None


def test_a_model_without_a_bank_says_so(folder) -> None:
    runner = new_runner(folder)
    assert "adapters" not in runner.capacity.parts
    with pytest.raises(EngineError, match="work for 'adapters', which has no runner"):
        step(runner, [1], {1: "a"}, fill=[(1, "a")])


def test_blocks_that_a_connector_moved_stand_for_computing_them(folder) -> None:
    connector = FakeConnector(delay=lambda identity: 0)
    first, second = (new_runner(folder, connector=connector) for _ in range(2))
    long = list(range(100, 140))
    expected = whole(first, long)
    size = first.capacity.groups[0].block_size
    count = 32 // size
    names = tuple(bytes([n]) * 8 for n in range(count))
    blocks = (tuple(range(1, 1 + count)),)
    saved = first.run(transferring(saves=(BlockTransfer(7, "r0", names, blocks),)))
    done = ended(saved) or ended(first.run(nothing()))
    assert done == (7,)
    moved = (tuple(range(11, 11 + count)),)
    loaded = second.run(transferring(loads=(BlockTransfer(8, "r0", names, moved),)))
    assert (ended(loaded) or ended(second.run(nothing()))) == (8,)
    assert whole(second, long, first=32, block=11) == expected


def transferring(**moves) -> Plan:
    return nothing(parts={"transfers": TransferPlan(**moves)})


def ended(result) -> tuple[int, ...]:
    return sum((report.value.done for report in result.parts), ())


def whole(runner, tokens, first=0, block=1) -> tuple[int, list[float]]:
    """The token after a prompt of which `first` tokens are in the cache, from `block` on."""
    params = SamplingParams(temperature=0.0, logprobs=3)
    count = len(tokens) - first
    plan = Plan(
        step=0,
        rows=np.zeros(1, dtype=np.int32),
        starts=np.array([first], dtype=np.int32),
        counts=np.array([count], dtype=np.int32),
        tokens=np.array(tokens[first:]),
        tables=tuple(
            np.arange(block, block + 10, dtype=np.int32)[None] for _ in runner.capacity.groups
        ),
        samples=np.ones(1, dtype=bool),
        admit=(RowStart(0, "r0", params, np.array(tokens), np.zeros(0, np.int64), 0),),
    )
    result = runner.run(plan)
    runner.run(nothing(release=(0,)))
    return int(result.tokens[0]), np.round(result.logprobs[0][0].values, 4).tolist()


def test_a_plan_that_moves_blocks_needs_a_connector(folder) -> None:
    with pytest.raises(EngineError, match="work for 'transfers', which has no runner"):
        new_runner(folder).run(transferring())
