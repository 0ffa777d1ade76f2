"""A device that wants every shape padded, by a package outside the core: forward pass, gather and
sampler see the declared sizes only, and the tokens are those of the plain CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from samples import parametrize_sample
from tests.canaries.padded_device import SIZES, PaddedDevice, PaddedQueue, shapes
from torch.overrides import TorchFunctionMode

from modulm import LLM, SamplingParams
from modulm.contracts.attention import StepLayout
from modulm.contracts.model import Batch
from modulm.engine.sampling.sampler import Sampler
from modulm.engine.worker.model_runner import ModelRunner
from modulm.errors import ConfigError, EngineError
from modulm.plugins.manager import PluginManager, current, using
from modulm.testing.checkpoints import make_tiny
from modulm.testing.drafters import FakeDrafter, drafting_executor, mixed
from modulm.testing.engines import check_empty

PROMPTS = [[5, 99, 7, 30], [17], [8] * 21, [7, 9, 11, 13] * 9, [3, 4, 5], [6, 7], [30, 31, 32]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, top_k=20, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=1, seed=5, top_p=0.9, max_tokens=7, ignore_eos=True),
    *[SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 3, 10)],
]
HIDDEN = 64
SETTINGS: dict[str, Any] = {
    "attention_backend": "sdpa",
    "kernels": "none",
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 40,
    "block_size": 8,
    "disable_frontend_multiprocessing": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("padded"), "LlamaForCausalLM"))


def answers(llm: LLM) -> list[Any]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [each.outputs[0].token_ids for each in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(folder: str) -> list[Any]:
    with using(PluginManager()), LLM(folder, device="cpu", **SETTINGS) as llm:
        return answers(llm)


class Shapes(TorchFunctionMode):
    """What reaches the model, the gather of hidden states, the head and the sampler."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.forward: set[tuple[int, ...]] = set()
        self.gathered: set[tuple[int, int]] = set()
        self.head: set[int] = set()
        self.sampled: set[tuple[int, int, int]] = set()
        model: Any = current().load("models", "LlamaForCausalLM")
        forward, logits = model.forward, model.logits
        sample, launch = Sampler.sample, ModelRunner._launch

        def noted_forward(model: Any, batch: Batch) -> torch.Tensor:
            sizes = batch.tokens, batch.positions, batch.query_starts, batch.sample
            self.forward.add(tuple(len(tensor) for tensor in sizes))
            return forward(model, batch)

        def noted_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
            self.head.add(len(hidden))
            return logits(model, hidden)

        def noted_sample(sampler: Any, rows: Any, positions: Any, values: torch.Tensor) -> Any:
            self.sampled.add((len(rows), len(positions), len(values)))
            return sample(sampler, rows, positions, values)

        def noted_launch(runner: Any, step: Any) -> None:
            with self:
                launch(runner, step)

        patch.setattr(model, "forward", noted_forward)
        patch.setattr(model, "logits", noted_logits)
        patch.setattr(Sampler, "sample", noted_sample)
        patch.setattr(ModelRunner, "_launch", noted_launch)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gathers = func is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor)
        if gathers and args[0].dim() == 2 and args[0].shape[1] == HIDDEN:
            self.gathered.add((len(args[0]), len(args[1])))
        return func(*args, **(kwargs or {}))

    def check(self, layouts: list[StepLayout]) -> None:
        """Only declared sizes, and more than one of each."""
        tokens, samples = set(SIZES.tokens), set(SIZES.samples)
        assert {t for t, _, _, _ in self.forward} <= tokens
        assert {p for _, p, _, _ in self.forward} <= tokens
        assert {starts - 1 for _, _, starts, _ in self.forward} <= set(SIZES.rows)
        assert {sample for *_, sample in self.forward} <= samples
        assert self.gathered
        assert self.gathered <= set(product(tokens, samples))
        assert self.head <= samples
        assert self.sampled
        assert self.sampled <= {(size, size, size) for size in samples}
        columns = SETTINGS["max_model_len"] // SETTINGS["block_size"]
        assert {shapes(step) for step in layouts} <= set(product(SIZES.rows, [columns], tokens))
        assert len({t for t, _, _, _ in self.forward}) > 1


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with using(PluginManager()):
        yield monkeypatch


@parametrize_sample("device", [PaddedDevice, PaddedQueue], every=2)
def test_only_declared_sizes_occur(folder, expected, patch, device) -> None:
    current().register("platforms", device.name, device)
    device.layouts.clear()
    seen = Shapes(patch)
    with LLM(folder, device=device.name, **SETTINGS) as llm:
        assert answers(llm) == expected
        check_empty(llm._core.loop)
    seen.check(device.layouts)


def test_prompts_of_one_token_join_rows_whose_tokens_are_pending(folder, patch) -> None:
    """As many padded rows as tokens, of which some are known to the host and some are not."""
    prompts = [{"prompt_token_ids": [token]} for token in (5, 17, 19, 23, 4, 8, 9, 2, 30, 31, 33)]
    params = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        for count in (9, 2, 3, 4, 2, 5, 3, 4, 6, 2, 3)
    ]
    settings = {**SETTINGS, "max_num_seqs": 6}

    def generated(device: str) -> list[Any]:
        with LLM(folder, device=device, **settings) as llm:
            return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    current().register("platforms", PaddedQueue.name, PaddedQueue)
    assert generated(PaddedQueue.name) == generated("cpu")


def test_drafts_are_padded_too(folder, expected, patch) -> None:
    current().register("platforms", PaddedDevice.name, PaddedDevice)
    whole = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    drafter = FakeDrafter(mixed, whole, most=3)
    current().register("executors", "drafting", drafting_executor(drafter))
    PaddedDevice.layouts.clear()
    seen = Shapes(patch)
    settings = {**SETTINGS, "distributed_executor_backend": "drafting"}
    with LLM(folder, device=PaddedDevice.name, **settings) as llm:
        assert answers(llm) == expected
    assert drafter.steps
    seen.check([])  # the drafter is shown the step's batch without padding, in a layout of its own


def test_sizes() -> None:
    assert SIZES.padding(2, 3) == [1, 4]
    assert SIZES.padding(4, 8) == []
    assert SIZES.padding(4, 7) == [1, 1, 1, 14]
    with pytest.raises(EngineError, match="9 rows and 9 tokens fits none"):
        SIZES.padding(9, 9)
    with pytest.raises(EngineError, match="samples 17 tokens"):
        SIZES.sampled(17)


def test_steps_of_one_row_each_are_refused(folder, patch) -> None:
    current().register("platforms", PaddedDevice.name, PaddedDevice)
    with pytest.raises(ConfigError, match="padded pads steps to few sizes"):
        LLM(folder, device=PaddedDevice.name, batch_invariant=True, **SETTINGS)
