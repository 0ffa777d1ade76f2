"""Benchmark prompts with media: random images, or files that a JSONL file names."""

from __future__ import annotations

import ast
import base64
import io
import json
import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from attrs import frozen

__all__ = [
    "BUCKETS",
    "FILE_KEYS",
    "RandomMedia",
    "content_parts",
    "file_parts",
    "parse_buckets",
    "random_media",
    "random_parts",
    "row_parts",
]

#: (height, width, frames) of random items -> how likely they are.
BUCKETS: Mapping[tuple[int, int, int], float] = {(256, 256, 1): 0.5, (720, 1280, 1): 0.5}
#: Key of a line of the file -> kind of its items.
FILE_KEYS = {
    "image_files": "image", "audio_files": "audio", "video_files": "video", "audio": "audio",
}  # fmt: skip


@frozen(kw_only=True)
class RandomMedia:
    """The items of random prompts.

    items: per prompt, on average. spread: 0 to 1, by which share more or fewer. most: limit per
    prompt. buckets: sizes, see `BUCKETS`.
    """

    items: int = 1
    spread: float = 0.0
    most: int = 255
    buckets: Mapping[tuple[int, int, int], float] = BUCKETS


def parse_buckets(text: str | None, limits: str | None) -> tuple[Mapping[Any, float], int]:
    """Read --random-mm-bucket-config and --random-mm-limit-mm-per-prompt.

    Returns buckets, and the most images of a prompt. Raises click.UsageError.
    """
    buckets: Any = BUCKETS
    if text is not None:
        try:
            buckets = ast.literal_eval(text)
            buckets = {tuple(map(int, key)): float(share) for key, share in buckets.items()}
        except (ValueError, SyntaxError, TypeError, AttributeError) as error:
            raise click.UsageError(
                f"--random-mm-bucket-config {text}: write {{(256, 256, 1): 0.5, ...}}"
            ) from error
    used = {key: share for key, share in buckets.items() if share}
    wrong = [key for key, share in used.items() if len(key) != 3 or min(key) < 1 or share < 0]
    if wrong or not used:
        raise click.UsageError(
            f"--random-mm-bucket-config {text}: heights, widths and frames are at least 1, shares "
            "above 0"
        )
    if any(frames > 1 for _, _, frames in used):
        raise click.UsageError(
            "--random-mm-bucket-config: not supported yet: videos (more than 1 frame); use "
            "--dataset-name custom_mm with video_files"
        )
    try:
        most = 255 if limits is None else int(json.loads(limits).get("image", 255))
    except (ValueError, TypeError, AttributeError) as error:
        raise click.UsageError(
            f'--random-mm-limit-mm-per-prompt {limits}: write {{"image": 3}}'
        ) from error
    return used, most


def random_media(options: Mapping[str, Any]) -> RandomMedia:
    """The items that a command's options ask for. Raises click.UsageError."""
    buckets, most = parse_buckets(
        options.get("random_mm_bucket_config"), options.get("random_mm_limit_mm_per_prompt")
    )
    return RandomMedia(
        items=options.get("random_mm_base_items_per_request") or 0,
        spread=options.get("random_mm_num_mm_items_range_ratio") or 0.0,
        most=most,
        buckets=buckets,
    )


def random_parts(media: RandomMedia, rng: np.random.Generator) -> tuple[dict[str, Any], ...]:
    """Images of noise for one prompt, as content parts of a chat message."""
    low = int(media.items * (1 - media.spread))
    high = max(low, int(media.items * (1 + media.spread)))
    count = min(int(rng.integers(low, high + 1)), media.most)
    sizes, shares = list(media.buckets), np.array(list(media.buckets.values()))
    picked = rng.choice(len(sizes), count, p=shares / shares.sum())
    return tuple(_noise(*sizes[index][:2], rng) for index in picked)


def _noise(height: int, width: int, rng: np.random.Generator) -> dict[str, Any]:
    from PIL import Image

    file = io.BytesIO()
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "JPEG")
    return _part("image", _url("image/jpeg", file.getvalue()))


def file_parts(row: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], ...]:
    """Content parts of the files of a line: paths relative to the folder, or URLs.

    Raises click.UsageError for files that cannot be read.
    """
    parts: list[dict[str, Any]] = []
    for key, kind in FILE_KEYS.items():
        names = row.get(key) or ()
        names = [names] if key == kind and isinstance(names, str) else names
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise click.UsageError(f"{key}: must be a list of paths or URLs")
        parts += [_of_file(kind, str(name), folder) for name in names]
    return tuple(parts)


def content_parts(content: Any, folder: Path) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Read the parts of a message: its text, and the parts with their files as data.

    Besides OpenAI's parts there are {"type": "image", "image": PATH}. Raises click.UsageError.
    """
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise click.UsageError("content: must be a list of parts")
    texts, parts = [], []
    for part in content:
        kind = str(part.get("type", "")).removesuffix("_url")
        source = part.get(f"{kind}_url", part.get(kind))
        source = source.get("url") if isinstance(source, Mapping) else source
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
            parts.append({"type": "text", "text": part["text"]})
        elif kind in FILE_KEYS.values() and isinstance(source, str):
            parts.append(_of_file(kind, source, folder))
        else:
            raise click.UsageError(f"content: {part!r:.80} is neither text nor a file")
    return "".join(texts), tuple(parts)


def row_parts(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Content parts of a row of a dataset of the Hub: columns with images, which are URLs."""
    values = [row.get("image"), *(row.get("images") or ())]
    return tuple(
        _part("image", value["src"])
        for value in values
        if isinstance(value, Mapping) and isinstance(value.get("src"), str)
    )


def _of_file(kind: str, name: str, folder: Path) -> dict[str, Any]:
    if name.startswith(("http://", "https://", "data:")):
        return _part(kind, name)
    path = folder / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from error
    kind_of_file = mimetypes.guess_type(path.name)[0] or f"{kind}/{path.suffix[1:] or 'mpeg'}"
    return _part(kind, _url(kind_of_file, data))


def _url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _part(kind: str, url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
