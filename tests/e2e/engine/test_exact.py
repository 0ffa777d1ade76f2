"""A request's tokens and log probabilities, to the last bit, however it is run.

Alone or in a crowd, in chunks of any size, with a prefix hit or without, preempted or not, with
steps prepared ahead, in any order of arrival, while others are aborted. On the compiled kernels
this holds as they are; on plain torch with `--batch-invariant`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import sample

from modulm.config import EngineConfig
from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams
from modulm.engine.core.engine_core import EngineCore
from modulm.plugins import current
from modulm.testing.checkpoints import make_tiny
from modulm.testing.engines import Recorder, check_empty

modulm_kernels_cpu = pytest.importorskip(
    "modulm_kernels_cpu", reason="no compiled CPU kernels: make setup says why"
)

#: How a request may be run, beside being run alone.
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "crowd": {"max_num_seqs": 16, "max_num_batched_tokens": 256},
    "chunks": {"max_num_seqs": 5, "max_num_batched_tokens": 11},
    "preempted": {"max_num_seqs": 8, "num_gpu_blocks_override": 7, "max_num_batched_tokens": 64},
    "ahead": {"max_num_seqs": 4, "max_num_batched_tokens": 40, "async_scheduling": True},
}
#: What runs it: architecture and flags.
KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("LlamaForCausalLM", {"dtype": "bfloat16"}),
    "single": ("LlamaForCausalLM", {"dtype": "float32"}),
    "half": ("LlamaForCausalLM", {"dtype": "float16"}),
    "latent": ("DeepseekV3ForCausalLM", {"dtype": "bfloat16"}),
    "delta": ("Qwen3NextForCausalLM", {"dtype": "bfloat16"}),
    "windows": ("Gemma3ForCausalLM", {"dtype": "bfloat16"}),
    "experts": ("MixtralForCausalLM", {"dtype": "bfloat16"}),
    "single-experts": ("MixtralForCausalLM", {"dtype": "float32"}),
    "states": ("GraniteMoeHybridForCausalLM", {"dtype": "bfloat16"}),
    "single-states": ("Mamba2ForCausalLM", {"dtype": "float32"}),
    "channels": ("JambaForCausalLM", {"dtype": "bfloat16"}),
    "side-by-side": ("FalconH1ForCausalLM", {"dtype": "bfloat16"}),
    "own-recurrence": ("KimiLinearForCausalLM", {"dtype": "bfloat16"}),
    "chunked": ("Llama4ForCausalLM", {"dtype": "bfloat16"}),
    "borrowed-keys": ("Gemma4ForCausalLM", {"dtype": "bfloat16"}),
}
TORCH: dict[str, tuple[str, dict[str, Any]]] = {
    name: (architecture, {"kernels": "none", "batch_invariant": True})
    for name, architecture in (
        ("plain", "LlamaForCausalLM"),
        ("latent", "DeepseekV3ForCausalLM"),
        ("states", "GraniteMoeHybridForCausalLM"),
    )
}
#: Several ranks: a process for each, so fewer arrangements.
RANKS = ("LlamaForCausalLM", {
    "dtype": "bfloat16", "tensor_parallel_size": 2, "distributed_executor_backend": "mp",
})  # fmt: skip
PLAIN = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
_names = count()


@define(eq=False)
class Bench:
    """An engine that records what it is told."""

    host: EngineCore = field(init=False)
    seen: Recorder = field(factory=Recorder)

    @classmethod
    def of(cls, folder: Path, flags: dict[str, Any]) -> Bench:
        made = cls()
        given = {"model": str(folder), "dtype": "float32", "cpu_threads": 1, "block_size": 32,
                 "kv_cache_memory_bytes": 1 << 22, "max_model_len": 160, **flags}  # fmt: skip
        made.host = EngineCore(EngineConfig.from_keywords(**given), current(), made.seen)
        return made

    def run(self, workload: list[dict[str, Any]], order: list[int]) -> dict[int, list[Any]]:
        """What each request of the workload got, by its place in it."""
        engine, names = self.host.loop, {}
        waiting = [(workload[place]["late"], place) for place in order]
        step = 0
        while waiting or engine.busy:
            for late, place in [item for item in waiting if item[0] <= step]:
                waiting.remove((late, place))
                names[place] = f"r{next(_names)}"
                engine.submit(_request(names[place], workload[place]))
            for place, item in enumerate(workload):
                if item["abort"] == step and place in names:
                    engine.abort(names[place])
            engine.tick()
            step += 1
            assert step < 3000, "the engine makes no progress"
        check_empty(engine)
        found = {place: self._bits(name) for place, name in names.items()}
        self.seen.steps.clear()
        return found

    def _bits(self, name: str) -> list[Any]:
        prompt: dict[int, Any] = {}
        for events in self.seen.steps:
            first, entries = events.prompt_logprobs.get(name, (0, ()))
            prompt |= {first + i: _entry(entry) for i, entry in enumerate(entries)}
        own = [_entry(entry) for e in self.seen.steps for entry in e.logprobs.get(name, ())]
        return [self.seen.tokens.get(name, []), own, sorted(prompt.items())]


def _entry(entry: Any) -> tuple[list[int], list[int], int]:
    return entry.ids.tolist(), np.asarray(entry.values).view(np.int32).tolist(), entry.rank


def _request(name: str, item: dict[str, Any]) -> Request:
    return Request(id=name, prompt=item["prompt"], params=item["params"], seed=item["seed"])


@st.composite
def workloads(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Prompts that begin alike, drawn and greedy, late, aborted, some with prompt logprobs."""
    stem = draw(st.lists(st.integers(8, 400), min_size=40, max_size=70))
    found = []
    for _ in range(draw(st.integers(2, 5))):
        head = stem[: draw(st.integers(0, len(stem)))]
        tail = draw(st.lists(st.integers(8, 400), min_size=1, max_size=30))
        params = PLAIN.with_(max_tokens=draw(st.integers(1, 8)))
        if draw(st.booleans()):
            params = params.with_(temperature=0.9, top_p=0.95, top_k=50, repetition_penalty=1.2)
        if draw(st.integers(0, 3)) == 0:
            params = params.with_(prompt_logprobs=1)
        found.append({
            "prompt": head + tail,
            "params": params,
            "seed": draw(st.integers(0, 99)),
            "late": draw(st.integers(0, 5)),
            "abort": draw(st.one_of(st.none(), st.none(), st.none(), st.integers(1, 9))),
        })  # fmt: skip
    return found


Benches = dict[str, Bench]


def _arrangements(request: pytest.FixtureRequest, engines: Iterable[str]) -> tuple[str, ...]:
    """All, for the first engine and for `make test-all`; for others chunks and one in turn."""
    number = list(engines).index(request.param)
    if number == 0 or request.config.getoption("--everything"):
        return tuple(ARRANGEMENTS)
    return "chunks", ("crowd", "preempted", "ahead")[number % 3]


@contextmanager
def _benches(folder: Path, engine: tuple[str, dict[str, Any]], *names: str) -> Iterator[Benches]:
    architecture, flags = engine
    make_tiny(folder, architecture, seed=5)
    whole = {"max_num_seqs": 1, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
    made = {
        name: Bench.of(folder, flags | own)
        for name, own in {"alone": whole, **ARRANGEMENTS}.items()
        if name in ("alone", *(names or ARRANGEMENTS))
    }
    yield made
    for bench in made.values():
        bench.host.stop()


@pytest.fixture(scope="module", params=sample(KERNELS, every=4))
def on_kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Benches]:
    folder, names = tmp_path_factory.mktemp("exact") / "tiny", _arrangements(request, KERNELS)
    with _benches(folder, KERNELS[request.param], *names) as made:
        yield made


@pytest.fixture(scope="module", params=sample(TORCH, every=3))
def on_torch(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Benches]:
    folder, names = tmp_path_factory.mktemp("exact") / "tiny", _arrangements(request, TORCH)
    with _benches(folder, TORCH[request.param], *names) as made:
        yield made


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Benches]:
    folder = tmp_path_factory.mktemp("exact") / "tiny"
    with _benches(folder, RANKS, "ahead") as made:
        yield made


@settings(max_examples=2, deadline=None)
@given(workloads(), st.randoms(use_true_random=False))
def test_compiled_kernels(on_kernels: Benches, workload: list[dict[str, Any]], random: Any) -> None:
    _check(on_kernels, workload, random)


@settings(max_examples=2, deadline=None)
@given(workloads(), st.randoms(use_true_random=False))
def test_plain_torch_token_by_token(
    on_torch: Benches, workload: list[dict[str, Any]], random: Any
) -> None:
    _check(on_torch, workload, random)


@settings(max_examples=2, deadline=None)
@given(workloads(), st.randoms(use_true_random=False))
def test_ranks_that_are_processes(
    on_ranks: Benches, workload: list[dict[str, Any]], random: Any
) -> None:
    _check(on_ranks, workload, random)


def _check(benches: Benches, workload: list[dict[str, Any]], random: Any) -> None:
    """What each request got alone is what it gets in every arrangement, or its beginning."""
    places = list(range(len(workload)))
    expected = {
        place: benches["alone"].run([{**workload[place], "abort": None, "late": 0}], [0])[0]
        for place in places
    }
    for name, bench in benches.items():
        if name == "alone":
            continue
        found = bench.run(workload, random.sample(places, len(places)))
        for place, (tokens, logprobs, prompt) in found.items():
            whole = expected[place]
            if workload[place]["abort"] is None:
                assert [tokens, logprobs, prompt] == whole, name
            else:
                assert tokens == whole[0][: len(tokens)], name
                assert logprobs == whole[1][: len(logprobs)], name
