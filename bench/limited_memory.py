"""Tokens of a model in mapped files that is larger than the memory granted, against the disk.

    python bench/limited_memory.py MODEL WEIGHTS_CACHE_DIR --memory-gb 0.8

Needs the right to create a memory cgroup (version 1), and a folder that an earlier start with
`--weights-memory mmap --dtype bfloat16` has filled. Each round reads the checkpoint from the disk,
which nothing has mapped, then generates three tokens. Prints JSON: the disk's GB/s, the model's
GB/s (the size of its packed file for each token), and the medians' ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median

from modulm import LLM, SamplingParams

GROUP = Path("/sys/fs/cgroup/memory/modulm-limited-memory")


def drop(file: Path) -> None:
    """Drop a file from the page cache, unless it is mapped."""
    with file.open("rb", buffering=0) as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_rate(file: Path) -> float:
    """GB/s of reading a file that is not in the page cache."""
    drop(file)
    with file.open("rb", buffering=0) as opened:
        began, chunk = time.perf_counter(), bytearray(1 << 22)
        while opened.readinto(chunk):
            pass
        seconds = time.perf_counter() - began
    drop(file)
    return file.stat().st_size / 1e9 / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--memory-gb", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    file = max(options.folder.glob("*.weights"), key=lambda path: path.stat().st_size)
    size = file.stat().st_size / 1e9
    (checkpoint,) = Path(options.model).glob("*.safetensors")
    drop(file)
    drop(checkpoint)
    GROUP.mkdir(exist_ok=True)
    (GROUP / "memory.limit_in_bytes").write_text(str(int(options.memory_gb * 1e9)))
    (GROUP / "cgroup.procs").write_text(str(os.getpid()))
    llm = LLM(
        options.model,
        dtype="bfloat16",
        weights_memory="mmap",
        weights_cache_dir=str(options.folder),
        max_model_len=512,
        num_gpu_blocks_override=40,
        skip_tokenizer_init=True,
    )

    def seconds_per_token(count: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": [5, 9, 40]}], params, use_tqdm=False)
        return (time.perf_counter() - began) / count

    disk, model = [], []
    for _ in range(options.rounds):
        disk.append(disk_rate(checkpoint))
        seconds_per_token(1)
        model.append(size / seconds_per_token(3))
    llm.shutdown()
    figures = {"file_gb": round(size, 2), "ratio": round(median(model) / median(disk), 2)}
    rates = {"disk_gb_s": disk, "model_gb_s": model}
    rounded = {name: [round(value, 2) for value in values] for name, values in rates.items()}
    print(json.dumps({**figures, **rounded}))


if __name__ == "__main__":
    main()
