"""500 updates of all weights while requests run: does anything grow?

    python bench/weight_update_soak.py [--updates 500] [--model demo]

One process; trainer and `AsyncLLM` (engine in a thread) share it. Prints one line of JSON: updates,
requests that were answered meanwhile, and memory (PSS), open files and segments in /dev/shm after
a tenth of the updates and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path

from safetensors.torch import load_file

from modulm import AsyncLLM, SamplingParams
from modulm_weights_shared_memory import SharedWeights


def usage() -> dict[str, float]:
    """What this process holds."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    pss = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    segments = len(list(Path("/dev/shm").glob("modulm-shared-weights-*")))
    files = len(os.listdir("/proc/self/fd"))
    return {"megabytes": round(pss / 1024, 1), "files": files, "segments": segments}


async def soak(model: str, updates: int) -> dict[str, object]:
    llm = AsyncLLM(
        model, max_model_len=256, max_num_seqs=4, disable_frontend_multiprocessing=True,
        weight_transfer_config={"backend": "shared_memory"},
    )  # fmt: skip
    answered, stop = 0, False

    async def load(number: int) -> None:
        nonlocal answered
        params = SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True, seed=number)
        while not stop:
            async for _ in llm.generate(f"Request {number}", params, f"{number}-{answered}"):
                pass
            answered += 1

    await llm.init_weight_transfer_engine()
    folder = Path(llm.info.path)
    tensors = {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}
    clients = [asyncio.create_task(load(number)) for number in range(3)]
    began, early = time.perf_counter(), usage()
    with SharedWeights(tensors) as shared:
        for number in range(updates):
            await llm.start_weight_update()
            await llm.update_weights(shared.info)
            await llm.finish_weight_update()
            if number == updates // 10:
                early = usage()
    seconds, late = time.perf_counter() - began, usage()
    stop = True
    await asyncio.gather(*clients)
    version = await llm.get_weight_version()
    llm.shutdown()
    return {
        "updates": version, "answers": answered, "seconds": round(seconds, 1), "early": early,
        "late": late,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    print(json.dumps(asyncio.run(soak(options.model, options.updates))))


if __name__ == "__main__":
    main()
