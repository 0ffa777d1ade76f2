"""What goes wrong in one request ends that request; the others get the same bits as without it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import sample

from modulm import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from modulm.contracts.sampling import LogitsProcessor, OutputKind, RowView
from modulm.errors import QueueFull, RequestError
from modulm.testing.checkpoints import make_tiny
from modulm.testing.engines import check_empty


class Trouble(LogitsProcessor):
    """Goes wrong as `extra_args` say: {"trouble": what, "at": token}."""

    keeps_argmax = False

    def admit(self, row: RowView) -> bool:
        asked = row.params.extra_args or {}
        if asked.get("trouble") == "admit":
            raise RuntimeError("not this one")
        return "trouble" in asked

    def apply_row(self, row: RowView, logits: torch.Tensor) -> torch.Tensor:
        asked: Mapping[str, Any] = row.params.extra_args or {}
        if len(row.output) < asked["at"]:
            return logits
        match asked["trouble"]:
            case "raise":
                raise RuntimeError("scripted trouble")
            case "shape":
                return logits[:-1]
            case "inf":
                return torch.full_like(logits, torch.inf)
            case "nothing":
                return torch.full_like(logits, -torch.inf)
        return torch.full_like(logits, torch.nan)


def trouble(what: str, at: int) -> dict[str, Any]:
    return {"extra_args": {"trouble": what, "at": at}}


BAD: list[dict[str, Any]] = [
    trouble("raise", 0), trouble("raise", 3), trouble("nan", 0), trouble("nan", 2),
    trouble("inf", 1), trouble("nothing", 1), trouble("shape", 2), trouble("admit", 0),
]  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, logprobs=2)
GOOD: list[SamplingParams] = [
    GREEDY,
    GREEDY.with_(temperature=1.0, seed=4, top_p=0.9),
    GREEDY.with_(repetition_penalty=1.3, logit_bias={9: 3.0}),
    GREEDY.with_(n=2, temperature=1.0, seed=8),
    GREEDY.with_(structured_outputs=StructuredOutputs(choice=["abcd", "fede"]), ignore_eos=False),
    GREEDY.with_(prompt_logprobs=1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("isolation") / "tiny", seed=11)


@pytest.fixture(scope="module", params=sample([True, False], every=2), ids=["ahead", "in turn"])
def llm(request: Any, folder: Path) -> Iterator[LLM]:
    with LLM(
        model=str(folder), dtype="float32", kernels="none", batch_invariant=True, cpu_threads=1,
        kv_cache_memory_bytes=1 << 23, async_scheduling=request.param, max_num_seqs=8,
        logits_processors=[Trouble], structured_outputs_config={"compile_workers": 1},
    ) as made:  # fmt: skip
        yield made


def prompts(count: int, rng: random.Random) -> list[dict[str, Any]]:
    stem = [rng.randrange(8, 400) for _ in range(40)]
    return [
        {"prompt_token_ids": [*stem[: rng.randrange(40)], rng.randrange(8, 400)]}
        for _ in range(count)
    ]


def bits(output: Any) -> list[Any]:
    """Everything that the model said, log probabilities as bits."""

    def positions(given: Any) -> Any:
        return [
            p and [(t, np.float32(e.logprob).view(np.int32).item(), e.rank) for t, e in p.items()]
            for p in given or ()
        ]

    return [
        positions(output.prompt_logprobs),
        [(list(c.token_ids), c.text, positions(c.logprobs)) for c in output.outputs],
    ]


def test_the_others_are_equal_to_the_bit(llm: LLM, rng: random.Random) -> None:
    asked = prompts(len(GOOD), rng)
    expected = [bits(output) for output in llm.generate(asked, GOOD, use_tqdm=False)]
    bad = [GREEDY.with_(**fields) for fields in BAD]
    mixed = [(p, g) for p, g in zip(asked, GOOD, strict=True)]
    for place, params in enumerate(bad):
        mixed.insert((place * 7) % len(mixed), (asked[place % len(asked)], params))
    outputs = llm.generate([p for p, _ in mixed], [g for _, g in mixed], use_tqdm=False)
    good = [bits(o) for o, (_, g) in zip(outputs, mixed, strict=True) if g in GOOD]
    wrong = [o for o, (_, g) in zip(outputs, mixed, strict=True) if g not in GOOD]
    assert good == expected
    assert len(wrong) == len(BAD)
    for output in wrong:
        assert output.outputs[0].finish_reason == "error"
        assert output.outputs[0].stop_reason
    check_empty(llm._core.loop)
    again = [bits(output) for output in llm.generate(asked, GOOD, use_tqdm=False)]
    assert again == expected


@pytest.mark.exhaustive
def test_a_soak_of_everything_at_once(folder: Path, rng: random.Random) -> None:
    """Shared beginnings, priorities, grammars, choices, troubles, and 30% aborted."""
    llm = AsyncLLM(
        model=str(folder), dtype="float32", kernels="none", cpu_threads=1, max_num_seqs=12,
        num_gpu_blocks_override=40, block_size=16, max_num_batched_tokens=64, max_model_len=128,
        scheduling_policy="priority", max_num_queued_reqs=60, logits_processors=[Trouble],
        disable_frontend_multiprocessing=True,
    )  # fmt: skip
    asked = prompts(240, rng)
    kinds = [*GOOD, *(GREEDY.with_(**fields) for fields in BAD[:8])]
    ends: list[str] = []

    async def one(place: int) -> None:
        params = rng.choice(kinds).with_(output_kind=rng.choice(list(OutputKind)))
        impatient = rng.random() < 0.3
        await asyncio.sleep(rng.random() * 2)
        source = llm.generate(asked[place], params, f"r{place}", priority=rng.randrange(3))
        try:
            async for output in source:
                if impatient and rng.random() < 0.5:
                    await source.aclose()
                    return
                ends.extend(c.finish_reason for c in output.outputs if c.finish_reason)
        except (QueueFull, RequestError):
            ends.append("refused")

    async def main() -> None:
        async with asyncio.timeout(600):
            await asyncio.gather(*(one(place) for place in range(len(asked))))
        assert llm.active == 0

    asyncio.run(main())
    engine = llm._core.core.loop
    engine.call(lambda: check_empty(engine)).result(300)
    assert {"length", "stop", "error"} <= set(ends)
    assert llm.stats is not None
    assert (llm.stats.running, llm.stats.waiting, llm.stats.usage) == (0, 0, 0.0)
    llm.shutdown()
