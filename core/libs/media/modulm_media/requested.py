"""Decoding and processing options that requests may set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.errors import RequestError
from modulm_media.flags import KINDS, MediaConfig

__all__ = ["io_options", "processor_options"]

#: Limit of frames per second, and of a size in pixels per side.
_FPS = 240
#: Names of size options; other options could make processors load or run something.
_SIZES = frozenset(
    {
        "crop_size", "crop_to_patches", "do_center_crop", "do_convert_rgb", "do_image_splitting",
        "do_normalize", "do_pad", "do_pan_and_scan", "do_rescale", "do_resize", "do_sample_frames",
        "dynamic_hd", "fps", "image_mean", "image_std", "longest_edge", "max_dynamic_patch",
        "max_frames", "max_image_size", "max_image_tiles", "max_num_patches", "max_patches",
        "max_pixels",
        "max_slice_nums", "max_soft_tokens", "min_dynamic_patch", "min_frames", "min_patches",
        "min_pixels", "num_crops", "num_frames", "pan_and_scan_max_num_crops",
        "pan_and_scan_min_crop_size", "pan_and_scan_min_ratio_to_activate", "rescale_factor",
        "resample", "return_row_col_info", "size", "use_audio_in_video", "use_thumbnail",
    }
)  # fmt: skip
_SIDE, _DEEP = 8192, 3


def io_options(flags: MediaConfig, options_by_kind: Any, field: str) -> dict[str, dict[str, Any]]:
    """Merge a request's decoding options into `--media-io-kwargs`, by kind.

    Raises RequestError for unknown options and for values out of bounds.
    """
    merged: dict[str, dict[str, Any]] = {
        kind: dict(flags.media_io_kwargs.get(kind, {})) for kind in KINDS
    }
    if options_by_kind is None:
        return merged
    if not isinstance(options_by_kind, Mapping):
        raise RequestError(f"{field}: a table of kinds is expected", field)
    for kind, options in options_by_kind.items():
        if kind not in KINDS or not isinstance(options, Mapping):
            raise RequestError(f"{field}: {kind!r:.40}: a table for image, audio or video", field)
        for name, value in options.items():
            _check(f"{field}.{kind}.{name:.40}", (kind, name), value, flags, field)
        merged[kind].update(options)
    return merged


def _check(where: str, option: tuple[str, str], value: Any, flags: MediaConfig, field: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if option == ("video", "num_frames"):
        most = flags.max_video_frames
        valid = number and isinstance(value, int) and (value == -1 or 0 < value <= most)
        expected = f"a number of frames, at most {most} (--max-video-frames), or -1"
    elif option == ("video", "fps"):
        valid = number and (value == -1 or 0 < value <= _FPS)
        expected = f"frames a second, at most {_FPS}, or -1"
    elif option == ("image", "rgba_background_color"):
        is_triple = isinstance(value, list | tuple) and len(value) == 3
        valid = is_triple and all(type(one) is int and 0 <= one < 256 for one in value)
        expected = "three numbers from 0 to 255"
    else:
        valid, expected = False, "not an option of requests"
    if not valid:
        raise RequestError(f"{where}: {expected}", field)


def processor_options(flags: MediaConfig, options: Any, field: str) -> dict[str, Any]:
    """Check a request's `mm_processor_kwargs`, which are untrusted. Raises RequestError."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise RequestError(f"{field}: must be a table", field)
    if flags.trust_request_mm_kwargs:
        return dict(options)
    for name, value in options.items():
        if name not in _SIZES:
            raise RequestError(
                f"{field}: requests may not set {name!r:.60}; options other than sizes need "
                "--trust-request-mm-kwargs",
                field,
            )
        most = flags.max_image_pixels if "pixels" in name else _SIDE
        if not _plain(value, most, 0, "pixels" in name):
            raise RequestError(f"{field}.{name}: at most {most} is allowed", field)
    return dict(options)


def _plain(value: Any, most: float, depth: int, pixels: bool) -> bool:
    """Whether a value holds only a few numbers, all within bounds."""
    if isinstance(value, Mapping):
        inner: Any = value.values()
        return (
            depth < _DEEP
            and len(value) <= 8
            and all(_plain(one, most, depth + 1, pixels) for one in inner)
        )
    if isinstance(value, list | tuple):
        return (
            depth < _DEEP
            and len(value) <= 8
            and all(_plain(one, most, depth + 1, pixels) for one in value)
        )
    if isinstance(value, str):
        return len(value) <= 32
    return (
        value is None
        or isinstance(value, bool)
        or (isinstance(value, int | float) and abs(value) <= most)
    )
