"""transformers' video processors without torchvision.

They need a few of torchvision's functions on tensors. These are reimplemented here with
bit-identical results, so that the checkpoint's own processor runs. torchvision wheels are tied to
one torch build, which makes them hard to install beside a CPU build.
"""

from __future__ import annotations

import builtins
import platform
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "InterpolationMode",
    "crop",
    "functions",
    "grayscale_to_rgb",
    "loaded",
    "normalize",
    "pad",
    "pil_to_tensor",
    "resize",
    "to_pil_image",
    "video_processor_class",
]


class InterpolationMode(Enum):
    """How pixels are interpolated."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"
    BOX = "box"
    HAMMING = "hamming"


#: Pillow's numbers for the modes.
_BY_NUMBER = {
    0: InterpolationMode.NEAREST,
    1: InterpolationMode.LANCZOS,
    2: InterpolationMode.BILINEAR,
    3: InterpolationMode.BICUBIC,
    4: InterpolationMode.BOX,
    5: InterpolationMode.HAMMING,
}
_SMOOTH = (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC, InterpolationMode.LANCZOS)
#: Pixels of an image that are copied at once.
_STRIP = 1 << 20


def resize(
    image: Tensor,
    size: Sequence[int] | int,
    interpolation: InterpolationMode | int = InterpolationMode.BILINEAR,
    antialias: bool = True,
) -> Tensor:
    """[..., height, width] -> [..., *size]; bytes stay bytes. interpolation: or Pillow's number.

    Raises ValueError for modes that torch does not have.
    """
    height, width = size if isinstance(size, Sequence) else (size, size)
    if tuple(image.shape[-2:]) == (height, width):
        return image
    if isinstance(interpolation, int):
        interpolation = _BY_NUMBER[interpolation]
    smooth = interpolation in _SMOOTH
    if not smooth and not interpolation.value.startswith("nearest"):
        raise ValueError(f"torch does not resize by {interpolation.value}")
    batch = image.reshape(-1, *image.shape[-3:])
    cast = batch.dtype not in (torch.float32, torch.float64, torch.uint8) or (
        batch.dtype == torch.uint8
        and interpolation == InterpolationMode.BILINEAR
        and not _resizes_bytes()
    )
    resized = F.interpolate(
        batch.float() if cast else batch,
        (height, width),
        mode=interpolation.value,
        align_corners=False if smooth else None,
        antialias=antialias and smooth,
    )
    if cast and not image.is_floating_point():
        resized = resized.clamp(0, 255) if image.dtype == torch.uint8 else resized
        resized = resized.round()
    return resized.to(image.dtype).reshape(*image.shape[:-2], height, width)


def _resizes_bytes() -> bool:
    """Whether torchvision resizes uint8 natively here, which rounds differently."""
    has_kernel = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return has_kernel or platform.machine() in ("aarch64", "arm64")


def normalize(
    image: Tensor, mean: Sequence[float], std: Sequence[float], inplace: bool = False
) -> Tensor:
    """(image - mean) / std for each channel of [..., channels, height, width]."""
    shape = (-1, 1, 1)
    middle = torch.as_tensor(mean, dtype=image.dtype, device=image.device).view(shape)
    spread = torch.as_tensor(std, dtype=image.dtype, device=image.device).view(shape)
    moved = image.sub_(middle) if inplace else image.sub(middle)
    return moved.div_(spread)


def pad(
    image: Tensor,
    padding: Sequence[int],
    fill: float | Sequence[float] = 0,
    padding_mode: str = "constant",
) -> Tensor:
    """Pad [..., channels, height, width]; padding: left, top, right, bottom.

    fill: a value, or one for each channel.
    """
    if isinstance(fill, Sequence):
        fills = [*fill] * (image.shape[-3] // len(fill))
        channels = zip(image.unbind(-3), fills, strict=True)
        return torch.stack([pad(channel, padding, value) for channel, value in channels], dim=-3)
    left, top, right, bottom = padding
    return F.pad(image, (left, right, top, bottom), mode=padding_mode, value=fill)


def crop(image: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """Crop [..., height, width]; the part lies inside the image."""
    return image[..., top : top + height, left : left + width]


def grayscale_to_rgb(image: Tensor) -> Tensor:
    """[..., 1 or 3, height, width] -> [..., 3, height, width]."""
    if image.shape[-3] >= 3:
        return image
    return image.expand(*image.shape[:-3], 3, *image.shape[-2:])


def to_pil_image(image: Tensor) -> Image:
    """[1 or 3, height, width] of bytes as an image of Pillow."""
    from PIL import Image

    pixels = image.permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def pil_to_tensor(image: Image) -> Tensor:
    """[channels, height, width] of bytes."""
    width, height = image.size
    rows = max(1, _STRIP // width)
    # Piece by piece: Pillow makes two further copies of what becomes an array.
    strips = (
        image.crop((0, top, width, min(top + rows, height))) for top in range(0, height, rows)
    )
    first = np.array(next(strips))
    whole = np.empty((height, *first.shape[1:]), first.dtype)
    whole[:rows] = first
    for number, strip in enumerate(strips, 1):
        whole[number * rows : (number + 1) * rows] = strip
    pixels = torch.from_numpy(whole)
    return pixels.view(height, width, -1).permute(2, 0, 1)


@lru_cache(maxsize=1)
def functions() -> SimpleNamespace:
    """The functions that transformers' modules import as `tvF`."""
    return SimpleNamespace(
        InterpolationMode=InterpolationMode, crop=crop, grayscale_to_rgb=grayscale_to_rgb,
        normalize=normalize, pad=pad, resize=resize,
    )  # fmt: skip


@lru_cache(maxsize=8)
def video_processor_class(name: str) -> Any:
    """transformers' video processor of that name, None if it has none."""
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

    for folder in VIDEO_PROCESSOR_MAPPING_NAMES:
        spec = find_spec(f"transformers.models.{folder}")
        spec = None if spec is None else find_spec(f"{spec.name}.video_processing_{folder}")
        source = "" if spec is None else Path(str(spec.origin)).read_text(encoding="utf-8")
        if f"\nclass {name}(" in source:
            return getattr(loaded(str(spec.name)), name)  # type: ignore[union-attr]
    return None


def loaded(name: str) -> ModuleType:
    """Import a module of transformers with our functions in place of torchvision's."""
    from transformers import image_processing_backends, video_processing_utils

    for shared in (image_processing_backends, video_processing_utils):
        vars(shared).setdefault("tvF", functions())
    if image_processing_backends.pil_torch_interpolation_mapping is None:
        image_processing_backends.pil_torch_interpolation_mapping = _BY_NUMBER
        # Checked for releases that lack features of `resize`.
        image_processing_backends.is_torchvision_greater_or_equal = lambda version: True
    spec = find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = module_from_spec(spec)
    vars(module).update(tvF=functions(), __builtins__={**vars(builtins), "__import__": _import})
    sys.modules[name] = module  # its classes' annotations are looked up here
    spec.loader.exec_module(module)
    return module


def _import(
    name: str,
    names: Mapping[str, object] | None = None,
    module_locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """`__import__` with our replacement for torchvision."""
    if level or name.partition(".")[0] != "torchvision":
        return builtins.__import__(name, names, module_locals, fromlist or (), level)
    older = SimpleNamespace(pil_to_tensor=pil_to_tensor, to_pil_image=to_pil_image)
    namespace = SimpleNamespace(
        transforms=SimpleNamespace(
            functional=older,
            v2=SimpleNamespace(functional=functions()),
            InterpolationMode=InterpolationMode,
        )
    )
    for part in name.split(".")[1:] if fromlist else ():
        namespace = getattr(namespace, part)
    return namespace
