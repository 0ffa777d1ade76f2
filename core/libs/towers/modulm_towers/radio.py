"""C-RADIO (arXiv 2312.06709, 2412.07679): images of any size, learned positions that are cropped
from a square, class tokens and registers before the patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.errors import CheckpointError
from modulm.nn import read_config
from modulm_layers import AttentionNames, only, size
from modulm_towers.blocks import Block, BlockNames, BlockShape
from modulm_towers.pieces import Pieces, Tower

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = ["CLIP_MEAN", "CLIP_STD", "RadioConfig", "RadioTower"]

#: Mean and deviation of the pixels, CLIP's.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_NAMES = BlockNames("norm1", "attn", AttentionNames("q", "k", "v", "proj", "qkv"), "norm2")
#: timm's name of an encoder to its width, layers, heads and feed-forward width.
_SHAPES: Mapping[str, tuple[int, int, int, int]] = {
    "vit_small_patch16_224": (384, 12, 6, 1536),
    "vit_base_patch16_224": (768, 12, 12, 3072),
    "vit_large_patch16_224": (1024, 24, 16, 4096),
    "vit_huge_patch16_224": (1280, 32, 16, 5120),
    "vit_so400m_patch16_224": (1152, 27, 16, 4304),
}


@frozen(kw_only=True)
class RadioConfig:
    """`vision_config` of models with RADIO: that of its files, with timm's name of the encoder and
    the teachers in `args`, or transformers' keys.

    max_img_size: pixels along the square of positions. video_temporal_patch_size: frames of a
    video that are one; 1 for files without an embedding of videos. summary: class tokens that are
    the summary, all if empty.
    """

    hidden_size: int = size(1280)
    intermediate_size: int = size(5120)
    num_hidden_layers: int = size(32)
    num_attention_heads: int = size(16)
    num_channels: int = size(3)
    patch_size: int = size(16)
    max_img_size: int = size(2048)
    num_cls_tokens: int = size(3)
    num_registers: int = size(7, least=0)
    video_temporal_patch_size: int = size(1)
    separate_video_embedder: bool = True
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    qkv_bias: bool = True
    qk_normalization: bool = False
    use_swiglu_ffn: bool = False
    summary: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        only(
            self, separate_video_embedder=(True,), qk_normalization=(False,),
            use_swiglu_ffn=(False,),
        )  # fmt: skip
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: does not divide hidden_size")
        if self.patch_size > self.max_img_size:
            raise ValueError("patch_size: larger than max_img_size")
        if any(not 0 <= index < self.num_cls_tokens for index in self.summary):
            raise ValueError(f"summary_idxs: {list(self.summary)}")

    @property
    def side(self) -> int:
        """Patches along the square of positions."""
        return round(self.max_img_size / self.patch_size)

    @property
    def skipped(self) -> int:
        """Tokens before the patches."""
        return self.num_cls_tokens + self.num_registers

    @classmethod
    def from_files(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read `vision_config`. Raises CheckpointError."""
        inner = table.get("args") or {}
        if not isinstance(inner, Mapping):
            raise CheckpointError(f"{file}: vision_config.args: must be a table")
        known: dict[str, Any] = {}
        if (name := inner.get("model")) is not None:
            if name not in _SHAPES:
                raise CheckpointError(
                    f"{file}: vision_config.args.model: not supported yet: {name!r}"
                )
            keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
            known |= dict(zip(keys, _SHAPES[name], strict=True))
            known |= _tokens(inner, file)
        if "cpe_max_size" in inner:
            known["max_img_size"] = inner["cpe_max_size"]
        width, ratio = table.get("hidden_size"), table.get("mlp_ratio", 4)
        if isinstance(width, int) and isinstance(ratio, int | float):
            known["intermediate_size"] = int(width * ratio)
        known["summary"] = table.get("summary_idxs", known.get("summary", ()))
        return read_config({**known, **table}, cls, file)


def _tokens(inner: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Numbers of class tokens and registers. inner: `args`. Raises CheckpointError."""
    teachers = inner.get("teachers") or []
    if not all(isinstance(teacher, Mapping) for teacher in teachers):
        raise CheckpointError(f"{file}: vision_config.args.teachers: must be tables")
    names = {str(teacher.get("name")) for teacher in teachers}
    count = len(names) if inner.get("cls_token_per_teacher") and names else 1
    registers, multiple = inner.get("num_registers") or 0, inner.get("register_multiple")
    if not registers and isinstance(multiple, int) and multiple > 0:
        registers = multiple - count % multiple
    used = [i for i, teacher in enumerate(teachers) if teacher.get("use_summary", True)]
    tokens: dict[str, Any] = {"num_cls_tokens": count, "num_registers": registers}
    return tokens | {"summary": [i for i in used if i < count]}


class RadioTower(Tower):
    """Encodes the concatenated patches of all images, or of the frames of videos."""

    first: Tensor
    positions: Tensor

    def __init__(self, c: RadioConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype, hidden = c, b.shared.dtype, c.hidden_size
        at, pixels = b.at("model.patch_generator"), c.num_channels * c.patch_size**2
        self.patch = at.linear("embedder", pixels, hidden, split=False)
        self.video = None
        if (frames := c.video_temporal_patch_size) > 1:
            self.video = at.linear("video_embedder", frames * pixels, hidden, split=False)
        at.parameter("pos_embed", self, "positions", (1, c.side**2, hidden))
        at.parameter("cls_token.token", self, "first", (c.skipped, hidden))
        block = BlockShape(
            hidden=hidden, inner=c.intermediate_size, heads=c.num_attention_heads,
            act=c.hidden_act, eps=c.layer_norm_eps, bias=c.qkv_bias, names=_NAMES,
        )  # fmt: skip
        layers = range(c.num_hidden_layers)
        self.layers = ModuleList(Block(b.at(f"model.blocks.{i}"), block) for i in layers)

    def run(
        self, pixels: Tensor, grids: Sequence[Sequence[int]], video: bool = False
    ) -> Pieces[tuple[Tensor, Tensor]]:
        """pixels: [patches, values per patch], row by row of images of (rows, columns) -> (patches:
        [patches, hidden], summaries: [images, class tokens * hidden]).

        video: whether patches are those of several frames.
        """
        c, embed = self.config, self.video if video and self.video is not None else self.patch
        table = {(rows, columns): self._cropped(rows, columns) for rows, columns in grids}
        counts = [rows * columns for rows, columns in grids]
        parts = embed(pixels.to(self.dtype)).split(counts)
        x = torch.cat([
            piece
            for (rows, columns), part in zip(grids, parts, strict=True)
            for piece in (self.first, part + table[rows, columns])
        ])  # fmt: skip
        lengths = [c.skipped + count for count in counts]
        for layer in self.layers:
            x = layer(x, lengths)
            yield len(x)
        rows_of = torch.split(x, lengths)
        used = list(c.summary or range(c.num_cls_tokens))
        summaries = torch.stack([row[used].flatten() for row in rows_of])
        return torch.cat([row[c.skipped :] for row in rows_of]), summaries

    def _cropped(self, rows: int, columns: int) -> Tensor:
        """[rows * columns, hidden]: the square, resized to the longer side and cropped."""
        side, most = self.config.side, max(rows, columns)
        square = self.positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        resized = F.interpolate(square, (most, most), mode="bilinear", align_corners=False)
        return resized[0, :, :rows, :columns].flatten(1).T.to(self.positions.dtype)
