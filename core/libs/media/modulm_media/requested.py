"""What requests may say of how media are decoded and processed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.errors import RequestError
from modulm_media.flags import KINDS, MediaConfig

__all__ = ["io_options", "processor_options"]

#: Most frames for each second, and the number by which no kind's options go.
_FPS = 240
#: What processors call sizes; other arguments may make them load or run something.
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


def io_options(flags: MediaConfig, given: Any, field: str) -> dict[str, dict[str, Any]]:
    """`--media-io-kwargs` with what a request has in their place, by kind.

    Raises RequestError for what is unknown or above all bounds.
    """
    found: dict[str, dict[str, Any]] = {
        kind: dict(flags.media_io_kwargs.get(kind, {})) for kind in KINDS
    }
    if given is None:
        return found
    if not isinstance(given, Mapping):
        raise RequestError(f"{field}: a table of kinds is expected", field)
    for kind, options in given.items():
        if kind not in KINDS or not isinstance(options, Mapping):
            raise RequestError(f"{field}: {kind!r:.40}: a table for image, audio or video", field)
        for name, value in options.items():
            _check(f"{field}.{kind}.{name:.40}", (kind, name), value, flags, field)
        found[kind].update(options)
    return found


def _check(where: str, option: tuple[str, str], value: Any, flags: MediaConfig, field: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if option == ("video", "num_frames"):
        most = flags.max_video_frames
        right = number and isinstance(value, int) and (value == -1 or 0 < value <= most)
        words = f"a number of frames, at most {most} (--max-video-frames), or -1"
    elif option == ("video", "fps"):
        right = number and (value == -1 or 0 < value <= _FPS)
        words = f"frames a second, at most {_FPS}, or -1"
    elif option == ("image", "rgba_background_color"):
        whole = isinstance(value, list | tuple) and len(value) == 3
        right = whole and all(type(one) is int and 0 <= one < 256 for one in value)
        words = "three numbers from 0 to 255"
    else:
        right, words = False, "requests have no such option"
    if not right:
        raise RequestError(f"{where}: {words}", field)


def processor_options(flags: MediaConfig, given: Any, field: str) -> dict[str, Any]:
    """`mm_processor_kwargs` of a request, which is a stranger's. Raises RequestError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise RequestError(f"{field}: a table is expected", field)
    if flags.trust_request_mm_kwargs:
        return dict(given)
    for name, value in given.items():
        if name not in _SIZES:
            raise RequestError(
                f"{field}: requests have no {name!r:.60}; others than sizes would need "
                "--trust-request-mm-kwargs",
                field,
            )
        most = flags.max_image_pixels if "pixels" in name else _SIDE
        if not _plain(value, most, 0, "pixels" in name):
            raise RequestError(f"{field}.{name}: no numbers above {most} are taken", field)
    return dict(given)


def _plain(value: Any, most: float, depth: int, pixels: bool) -> bool:
    """Whether a value holds numbers within bounds, and nothing that is long."""
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
