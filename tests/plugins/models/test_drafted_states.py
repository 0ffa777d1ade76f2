"""Drafted tokens and recurrent layers: a run has the bits of single steps, and rows go back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from samples import parametrize_sample

from modulm.config import EngineConfig
from modulm.contracts.executor import Plan
from modulm.engine.kv_cache.manager import KVCacheManager
from modulm.engine.worker.model_runner import ModelRunner
from modulm.loading import load_model, open_checkpoint
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny

ARCHITECTURES = ["Mamba2ForCausalLM", "GraniteMoeHybridForCausalLM"]
KERNELS = {
    # Matrix products of torch round by their shape: token by token they do not.
    "torch": {"kernels": "none", "attention_backend": "sdpa", "batch_invariant": True},
    "compiled": {},
}
PROMPT = [5, 99, 7, 30, 2, 2, 41, 8, 8]


class Rows:
    """Runs plans of one row on the model, with the tables of a real KV cache manager."""

    def __init__(self, folder, flags) -> None:
        config = EngineConfig.from_keywords(
            model=str(folder), max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256,
            num_gpu_blocks_override=65, dtype="float32", device="cpu", **flags,
        )  # fmt: skip
        plugins = manager.current()
        platform = plugins.load("platforms", "cpu")()
        loaded = load_model(config, open_checkpoint(config, plugins), platform, plugins)
        self.runner = ModelRunner(config, loaded, platform, plugins)
        self.invariant = bool(config.model.batch_invariant)
        self.cache = KVCacheManager(self.runner.capacity, 4)
        self.computed: dict[int, int] = {}

    def admit(self, row: int) -> None:
        assert self.cache.admit(row, self.cache.lookup({}, 0), 1, 1, 0.0)
        self.computed[row] = 0

    @torch.inference_mode()
    def run(self, row: int, tokens: list[int], drafted: int = 0, accepted: int = 0):
        """Hidden states of the tokens; with drafts, the row stands after `accepted` of them."""
        one, start, count = np.array([row]), self.computed[row], len(tokens)
        assert self.cache.grow(one, np.array([start + count]))
        drafts, slots = None, ()
        if drafted:
            wanted = np.array([drafted])
            drafts, slots = self.cache.lend(one, wanted, np.array([start]))
            assert drafts.tolist() == [drafted]
        plan = Plan(
            0, one.astype(np.int32), np.array([start], np.int32), np.array([count], np.int32),
            np.array(tokens), self.cache.tables(one), np.ones(1, bool), drafted=drafts,
            state_slots=slots,
        )  # fmt: skip
        indices = np.arange(count)
        runner = self.runner
        forward = runner._alone(plan) if self.invariant else runner._together(plan, indices)
        hidden = forward[0].clone()
        self.computed[row] = start + (accepted or count)
        if drafted:
            self.cache.settle(one, np.array([self.computed[row]]))
        return hidden


@parametrize_sample("mode", ["none", "all"], every=3)
@parametrize_sample(
    ("architecture", "kernels"),
    [(architecture, kernels) for kernels in KERNELS for architecture in ARCHITECTURES],
    every=3,
)
def test_a_drafted_run_is_walked_in_single_steps(tmp_path, architecture, kernels, mode) -> None:
    if kernels == "compiled":
        pytest.importorskip("modulm_kernels_cpu", reason="no compiled CPU kernels")
    cache_flags = {"mamba_cache_mode": "all", "mamba_block_size": 64} if mode == "all" else {}
    rows = Rows(make_tiny(tmp_path / "tiny", architecture), {**KERNELS[kernels], **cache_flags})
    draw = np.random.default_rng(0)
    text = [*PROMPT, *draw.integers(3, 90, 90).tolist()]
    rows.admit(0)
    rows.admit(1)
    rows.run(0, text[:9])
    rows.run(1, text[:9])
    single = torch.cat([rows.run(0, [token]) for token in text[9:]])
    at = 9
    while at < len(text) - 6:  # runs of which a part is right, over the end of a block
        accepted, drafted = int(draw.integers(1, 6)), 4
        wrong = draw.integers(3, 90, 5 - accepted).tolist()
        run = [*text[at : at + accepted], *wrong]
        hidden = rows.run(1, run, drafted, accepted)
        assert torch.equal(hidden[:accepted], single[at - 9 : at - 9 + accepted])
        at += accepted
    rest = torch.cat([rows.run(1, [token]) for token in text[at:]])
    assert torch.equal(rest, single[at - 9 :])
    rows.cache.release(0)
    rows.cache.release(1)
    assert all(group.pool.used == 0 for group in rows.cache.groups)
