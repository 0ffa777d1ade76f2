"""Adapters of an engine that sleeps: slots and host memory are filled again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from modulm import SamplingParams
from modulm.contracts.sampling import OutputKind
from modulm.errors import NotFound
from modulm.testing.adapters import write_lora
from modulm_server.engine.adapters import Adapter
from modulm_server.engine.async_llm import AsyncLLM

PARAMS = SamplingParams(
    temperature=0, max_tokens=6, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY
)


async def said(engine: AsyncLLM, name: str, adapter: str | None) -> list[int]:
    outputs = engine.generate("one two three", PARAMS, name, adapter=adapter)
    return [list(output.outputs[0].token_ids) async for output in outputs][-1]


def test_awake_again_each_says_what_it_said(tiny_folder: Path, tmp_path: Path) -> None:
    shapes = {"q_proj": (64, 64), "o_proj": (64, 64)}
    modules = {
        f"model.layers.{layer}.self_attn.{name}": shape
        for layer in range(2)
        for name, shape in shapes.items()
    }
    engine = AsyncLLM(
        str(tiny_folder), enable_lora=True, max_loras=1, enable_sleep_mode=True, dtype="float32",
        disable_frontend_multiprocessing=True, num_gpu_blocks_override=64, max_model_len=128,
    )  # fmt: skip

    async def run() -> None:
        for seed, name in enumerate("ab"):
            path = write_lora(tmp_path / name, modules, 8, seed, lora_alpha=16)
            await asyncio.wrap_future(engine.load_adapter(Adapter(name, str(path))))
        names = (None, "a", "b", "a")
        before = [await said(engine, f"before{n}", name) for n, name in enumerate(names)]
        assert before[1] == before[3]
        assert len({tuple(tokens) for tokens in before}) == 3
        for level in (1, 2):
            await engine.sleep(level)
            await engine.wake_up()
            after = [await said(engine, f"{level}.{n}", name) for n, name in enumerate(names)]
            assert after == before
        await asyncio.wrap_future(engine.unload_adapter("a"))
        with pytest.raises(NotFound):
            await said(engine, "gone", "a")

    try:
        asyncio.run(run())
    finally:
        engine.shutdown()
