"""What the largest step takes is measured by running one, where the platform counts memory."""

from __future__ import annotations

import pytest

from modulm.config import EngineConfig
from modulm.contracts.platform import Memory
from modulm.engine.worker.model_runner import ModelRunner
from modulm.loading import load_model, open_checkpoint
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny

MIB = 1 << 20
_Cpu = manager.current().load("platforms", "cpu")


class Counting(_Cpu):
    """Tells what it was told; a step takes `step` bytes."""

    step = 5 * MIB

    def memory(self) -> Memory:
        return Memory(80 * MIB, 80 * MIB)

    def reset_peak_memory(self) -> int:
        return 7 * MIB

    def peak_memory(self) -> int:
        return 7 * MIB + self.step


def made(folder, platform) -> tuple[ModelRunner, list[tuple[int, int, int]]]:
    """A runner, and (tokens, rows, rows sampled) of the forward passes that were run for it."""
    config = EngineConfig.from_keywords(
        model=str(folder), max_num_seqs=6, max_num_batched_tokens=100, max_model_len=64,
        dtype="float32", gpu_memory_utilization=0.5, enforce_eager=True,
    )  # fmt: skip
    plugins = manager.current()
    loaded = load_model(config, open_checkpoint(config, plugins), platform, plugins)
    forward, seen = loaded.model.forward, []

    def watched(batch):
        seen.append((len(batch.tokens), len(batch.query_starts) - 1, len(batch.sample)))
        return forward(batch)

    loaded.model.forward = watched
    return ModelRunner(config, loaded, platform, plugins), seen


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GraniteMoeHybridForCausalLM"])
def test_the_largest_step_is_run_once(tmp_path, architecture) -> None:
    assert made(make_tiny(tmp_path / "tiny", architecture), Counting())[1] == [(100, 6, 6)]


def test_the_caches_get_the_rest(tmp_path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    runner, _ = made(folder, Counting())
    held = sum(cache.nbytes for cache in runner.builder.caches)

    class Greedy(Counting):
        step = 40 * MIB - held // 2

    (before,), (after,) = runner.sizing.blocks, made(folder, Greedy())[0].sizing.blocks
    assert before // 2 - 1 <= after <= before // 2 + 1


def test_a_platform_that_counts_nothing_runs_nothing(tmp_path) -> None:
    assert made(make_tiny(tmp_path / "tiny"), _Cpu())[1] == []
