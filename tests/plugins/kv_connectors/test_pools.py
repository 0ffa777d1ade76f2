"""A prefill and a decode replica behind one `AsyncLLM`: the answers are those of one engine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from modulm import LLM, AsyncLLM, SamplingParams
from modulm.testing.checkpoints import make_tiny

FLAGS: dict[str, Any] = {
    "dtype": "float32", "block_size": 32, "max_model_len": 256, "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 32, "cpu_threads": 1,
}  # fmt: skip
#: The second one is too short to be computed elsewhere.
PROMPTS = [[5 + i, 9, 40, 7] * 45 for i in range(4)] + [[8, 9, 10] * 4]
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)
#: Tokens of a long prompt's full blocks.
STORED = 160


def free_port() -> int:
    """Outgoing connections use ports above these."""
    for port in range(20_001 + os.getpid() * 10 % 10_000, 32_000, 2):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


async def answer(llm: AsyncLLM, index: int, name: str) -> Any:
    prompt = {"prompt_token_ids": PROMPTS[index]}
    return [output async for output in llm.generate(prompt, PARAMS, name)][-1]


def result(output: Any) -> Any:
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def test_two_pools(tmp_path: Path) -> None:
    model = str(make_tiny(tmp_path / "model", "Qwen3ForCausalLM"))
    with LLM(model, **FLAGS) as llm:
        prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
        expected = [result(output) for output in llm.generate(prompts, PARAMS, use_tqdm=False)]

    async def run() -> None:
        engine = AsyncLLM(
            model, **FLAGS, prefill_replicas=1, decode_replicas=1,
            kv_transfer_config={
                "kv_connector": "peer", "kv_port": free_port(),
                "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 22},
            },
        )  # fmt: skip
        try:
            outputs = await asyncio.gather(
                *(answer(engine, index, f"a{index}") for index in (0, 1, 4))
            )
            assert [result(output) for output in outputs] == [expected[i] for i in (0, 1, 4)]
            assert [output.num_cached_tokens for output in outputs] == [STORED, STORED, 0]
            # The decode replica has the prefix now.
            assert result(await answer(engine, 0, "again")) == expected[0]
            # One request ends while its prompt is computed elsewhere; another loses its replica.
            lost = asyncio.create_task(answer(engine, 2, "lost"))
            aborted = asyncio.create_task(answer(engine, 3, "aborted"))
            await asyncio.sleep(0)
            aborted.cancel()
            os.kill(engine.process_ids[0], signal.SIGKILL)
            assert result(await asyncio.wait_for(lost, 300)) == expected[2]
            assert result(await asyncio.wait_for(answer(engine, 3, "b"), 300)) == expected[3]
            assert await engine.drain(10)
        finally:
            engine.shutdown()

    asyncio.run(run())
