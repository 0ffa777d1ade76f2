"""Vision encoders compared with the machine's GEMM rate and transformers; a repeated image; a text
stream beside an image that is encoded whole and in pieces; streams beside a video that is decoded.

    python bench/media.py [--pixels 1024] [--runs 3] [--gaps] [--video]

Random checkpoints with the encoder of Qwen3-VL, which is SigLIP 2 so400m (27 layers of width 1,152
with global attention), and that of Qwen2.5-VL of similar size (windowed attention). The text model
is tiny, so the encoder dominates. The work of an encoder is the FLOPs of its linear layers and
attention; times are medians. transformers runs the same files in the faster of two dtypes, in a
process with the same malloc settings. --gaps runs only the stream: the largest time between two of
its tokens, with and without a concurrent image. --video runs only four streams of ten seconds, in
turns alone and with 64 frames of a video of 640 x 360 pixels decoded meanwhile, as the server does.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from probe import gemm_rate

import modulm
from modulm.contracts.media import MediaItem
from modulm.testing.session import Session
from modulm_platform_cpu.memory import keep_freed_memory

_TEXT = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
_TOWER = {"depth": 27, "num_heads": 16, "in_channels": 3, "temporal_patch_size": 2}
#: Architecture -> its `vision_config`.
TOWERS: dict[str, dict[str, Any]] = {
    "Qwen3VLForConditionalGeneration": {
        **_TOWER, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16,
        "out_hidden_size": 256, "num_position_embeddings": 2304, "spatial_merge_size": 2,
        "deepstack_visual_indexes": [8, 16], "hidden_act": "gelu_pytorch_tanh",
    },
    "Qwen2_5_VLForConditionalGeneration": {
        **_TOWER, "hidden_size": 1152, "intermediate_size": 2816, "patch_size": 14,
        "out_hidden_size": 256, "window_size": 112, "fullatt_block_indexes": [6, 13, 20, 26],
        "spatial_merge_size": 2, "hidden_act": "silu",
    },
}  # fmt: skip


def write(architecture: str, folder: Path) -> Path:
    """Write a random checkpoint in bf16 with a tokenizer and a processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    from modulm.plugins import current
    from modulm_towers.testing import ImageFamily, write_family

    driver = current().load("models", architecture)
    tiny, vision = driver.tiny(), TOWERS[architecture]
    text = {**tiny["text_config"], **_TEXT, "num_attention_heads": 4, "num_key_value_heads": 4}
    text |= {"head_dim": 64, "max_position_embeddings": 8192}
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [16, 8, 8]}
    image = Qwen2VLImageProcessorPil(
        patch_size=vision["patch_size"], merge_size=2, temporal_patch_size=2,
        size={"shortest_edge": 56 * 56, "longest_edge": 2048 * 2048},
    )  # fmt: skip

    class Files:
        def save_pretrained(self, to: Path) -> None:
            image.save_pretrained(to)
            name = architecture.replace("ForConditionalGeneration", "Processor")
            (to / "processor_config.json").write_text(f'{{"processor_class": "{name}"}}')

    tokens = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    tokens |= {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
    changes = {"text_config": text, "vision_config": vision, "dtype": "bfloat16"}
    return write_family(
        ImageFamily(driver, tokens, lambda tokenizer: Files(), changes=changes), folder
    )


def flops(vision: dict[str, Any], side: int) -> float:
    """FLOPs of an image with `side` patches along each side."""
    patches, width = side * side, vision["hidden_size"]
    gated = "fullatt_block_indexes" in vision
    weights = 4 * width * width + (3 if gated else 2) * width * vision["intermediate_size"]
    merged = (4 * width) ** 2 + 4 * width * vision["out_hidden_size"]
    mergers = 1 + len(vision.get("deepstack_visual_indexes", ()))
    window = (vision.get("window_size", 0) // vision["patch_size"]) ** 2
    whole = len(vision["fullatt_block_indexes"]) if gated else vision["depth"]
    seen = whole * patches + (vision["depth"] - whole) * window
    products = vision["depth"] * weights + mergers * merged / 4
    return 2.0 * patches * products + 4.0 * patches * width * seen


def median(run: Callable[[], object], runs: int) -> float:
    """Median seconds after a warm-up run."""
    run()
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def picture(pixels: int, seed: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((pixels, pixels))


@torch.inference_mode()
def encoders(folder: Path, vision: dict[str, Any], pixels: int, runs: int) -> None:
    """Time the encoder alone, modulm's and transformers'."""
    import transformers

    side = round(pixels / (2 * vision["patch_size"])) * 2
    numbers = 3 * 2 * vision["patch_size"] ** 2
    values = np.random.default_rng(0).standard_normal((side * side, numbers), dtype=np.float32)
    grid = np.array([[1, side, side]])
    tensors = {"pixel_values": values, "image_grid_thw": grid}
    item = MediaItem("image", b"", 0, side * side // 4, tensors)
    work = flops(vision, side)
    keep_freed_memory()
    session = Session(folder, dtype="bfloat16", device="cpu")
    peak = gemm_rate()
    mine = median(lambda: session.model.encode([item]), runs)
    peak = max(peak, gemm_rate())
    print(f"  {side * side} patches, {work / 1e12:.2f} TFLOP; GEMM rate {peak:.0f} GFLOP/s")
    print(f"  modulm: {mine:.2f} s, {work / mine / 1e9:.0f} GFLOP/s, {work / mine / 1e9 / peak:.2f}"
          " of the GEMM rate", flush=True)  # fmt: skip
    theirs = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
        tower = model.model.visual.eval()
        given = torch.from_numpy(values).to(dtype), torch.from_numpy(grid)
        theirs[dtype] = median(lambda tower=tower, given=given: tower(*given), 1)
        print(f"  transformers, {dtype}: {theirs[dtype]:.2f} s", flush=True)
    print(f"  modulm is {min(theirs.values()) / mine:.2f} times as fast")


def twice(folder: Path, pixels: int) -> None:
    """Time to first token of a question about an image, and of another one about the same image."""
    params = modulm.SamplingParams(max_tokens=1, temperature=0)
    settings = {"dtype": "bfloat16", "device": "cpu", "max_model_len": 8192}
    with modulm.LLM(str(folder), **settings) as llm:

        def ask(seed: int, text: str) -> float:
            prompt = f"<|vision_start|><|image_pad|><|vision_end|>{text}"
            data = {"image": picture(pixels, seed)}
            began = time.perf_counter()
            llm.generate({"prompt": prompt, "multi_modal_data": data}, params, use_tqdm=False)
            return time.perf_counter() - began

        ask(0, "What is this?")
        first, again, other = ask(1, "What is this?"), ask(1, "What is this?"), ask(1, "Who?")
    print(f"  first token: {first:.2f} s; the same again {again:.3f} s ({again / first:.3f}); "
          f"another question about it {other:.3f} s ({other / first:.3f})", flush=True)  # fmt: skip


async def gaps(folder: Path, pixels: int) -> None:
    """Largest gaps of a stream, and time to first token of an image, by `--mm-encoder-chunk`."""
    for chunk in (0, 32768, 8192):
        engine = modulm.AsyncLLM(
            str(folder), dtype="bfloat16", device="cpu", max_model_len=8192,
            mm_encoder_chunk=chunk, disable_frontend_multiprocessing=True,
        )  # fmt: skip
        try:
            await _ask(engine, "warm", picture(pixels, 0))
            alone = await _ask(engine, "alone", picture(pixels, 1))
            times: list[float] = []
            stream = asyncio.create_task(_stream(engine, times))
            while len(times) < 20:
                await asyncio.sleep(0.01)
            before, began = len(times), time.perf_counter()
            first = await _ask(engine, "beside", picture(pixels, 2))
            count = len(times) - before
            stream.cancel()
        finally:
            engine.shutdown()
        apart = np.diff([began, *times[before:]])
        print(f"  chunk {chunk}: largest gap {apart.max():.3f} s (median without the image "
              f"{np.median(np.diff(times[:before])):.4f} s), {count} tokens meanwhile; the image's "
              f"first token after {first:.2f} s, alone {alone:.2f} s", flush=True)  # fmt: skip


def film(frames: int = 300, size: tuple[int, int] = (640, 360)) -> bytes:
    """A file of moving noise in H.264, at 30 frames per second."""
    import av

    file = io.BytesIO()
    still = np.asarray(picture(size[0], 0).resize((size[0] * 2, size[1])))
    with av.open(file, "w", "mp4") as container:
        stream = container.add_stream("h264", 30)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(frames):
            at = number * 2 % size[0]
            shown = np.ascontiguousarray(still[:, at : at + size[0]])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shown, "rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


async def decoding(folder: Path, runs: int) -> None:
    """Tokens of four streams in ten seconds, alone and beside a video that is decoded."""
    from modulm_media.workers import DecodeWorkers

    data, workers = film(), DecodeWorkers(1)
    options = {"num_frames": 64, "fps": -1}
    engine = modulm.AsyncLLM(
        str(folder), dtype="bfloat16", device="cpu", max_model_len=8192,
        disable_frontend_multiprocessing=True,
    )  # fmt: skip
    times: list[float] = []
    streams = [asyncio.create_task(_streams(engine, times, f"stream {i}")) for i in range(4)]
    try:
        workers.decode("video", data, options)
        while len(times) < 40:
            await asyncio.sleep(0.01)
        ratios = []
        for _ in range(runs):
            counts, seconds = [], 0.0
            for beside in (False, True):
                before, began = len(times), time.perf_counter()
                if beside:
                    video = await asyncio.to_thread(workers.decode, "video", data, options)
                    seconds = time.perf_counter() - began
                    assert len(video.frames) == 64
                await asyncio.sleep(10 - (time.perf_counter() - began))
                counts.append((len(times) - before) / (time.perf_counter() - began))
            ratios.append(counts[1] / counts[0])
            print(f"  {counts[0]:.0f} tokens per second alone, {counts[1]:.0f} beside a video, "
                  f"decoded in {seconds:.2f} s: {ratios[-1]:.3f}", flush=True)  # fmt: skip
        print(f"  the streams keep {statistics.median(ratios):.3f} (median)")
    finally:
        for stream in streams:
            stream.cancel()
        engine.shutdown()
        workers.close()


async def _ask(engine: modulm.AsyncLLM, name: str, image: Image.Image) -> float:
    """Seconds to the first token of a question about an image."""
    prompt = "<|vision_start|><|image_pad|><|vision_end|>What is this?"
    asked = {"prompt": prompt, "multi_modal_data": {"image": image}}
    began = time.perf_counter()
    async for _ in engine.generate(asked, modulm.SamplingParams(max_tokens=1), name):
        pass
    return time.perf_counter() - began


async def _streams(engine: modulm.AsyncLLM, times: list[float], name: str) -> None:
    """Stream one short text after another until cancelled, so that steps stay alike."""
    for number in itertools.count():
        await _stream(engine, times, f"{name}.{number}", length=250)


async def _stream(
    engine: modulm.AsyncLLM, times: list[float], name: str = "stream", length: int = 8000
) -> None:
    """Stream a text of `length` tokens, recording the time of each."""
    params = modulm.SamplingParams(max_tokens=length, ignore_eos=True)
    async for output in engine.generate("Once upon a time", params, name):
        if output.outputs[0].token_ids:
            times += [time.perf_counter()]


def main() -> None:
    """Print the figures of each encoder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--gaps", action="store_true", help="a stream beside an image")
    parser.add_argument("--video", action="store_true", help="streams beside a video")
    parser.add_argument("--only", default="", help="architectures whose name contains this")
    options = parser.parse_args()
    for architecture, vision in TOWERS.items():
        if options.only in architecture:
            print(architecture, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                path = write(architecture, Path(folder) / "checkpoint")
                if options.video:
                    asyncio.run(decoding(path, options.runs))
                    return
                if options.gaps:
                    asyncio.run(gaps(path, options.pixels))
                    continue
                encoders(path, vision, options.pixels, options.runs)
                twice(path, options.pixels)


if __name__ == "__main__":
    main()
