"""Nemotron 3 Omni: RADIO (arXiv 2312.06709) on images of any size and pairs of frames of videos,
and Parakeet's encoder on sounds, before Nemotron-H.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, WeightNames
from modulm_layers import AttentionNames, PlainMLP, only, size
from modulm_nemotron.nemotron_h import NemotronHForCausalLM
from modulm_towers import (
    Block,
    BlockNames,
    BlockShape,
    MultimodalConfig,
    MultimodalModel,
    ParakeetConfig,
    ParakeetTower,
    Pieces,
    Tower,
    patches,
    through,
)

__all__ = [
    "PATCHES",
    "NemotronOmniConfig",
    "NemotronOmniForConditionalGeneration",
    "RadioConfig",
    "RadioTower",
]

_ARCHITECTURE = "NemotronH_Omni_Reasoning_V3"
#: Keys of released files, and of later ones.
_OLDER = {
    "llm_config": "text_config", "img_context_token_id": "image_token_id",
    "sound_config": "audio_config", "sound_context_token_id": "audio_token_id",
}  # fmt: skip
_NAMES = BlockNames(
    norm1="norm1",
    attn="attn",
    projections=AttentionNames("q_proj", "k_proj", "v_proj", "proj", "qkv"),
    norm2="norm2",
)
_PROJECTOR_EPS = 1e-5
#: The side of the square of patches that form a token, and their number.
_SIDE, PATCHES = 2, 4

#: (rows, columns) of patches.
Grid = Sequence[int]


@frozen(kw_only=True)
class RadioConfig:
    """`vision_config`. max_img_size: pixels of a side that has a position for each patch.
    num_cls_tokens, num_registers: learned tokens before those of an image.
    video_temporal_patch_size: frames of a patch of a video.
    """

    hidden_size: int = size(1280)
    num_hidden_layers: int = size(32)
    num_attention_heads: int = size(16)
    mlp_ratio: float = 4.0
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    num_channels: int = size(3)
    patch_size: int = size(16)
    max_img_size: int = size(2048)
    num_cls_tokens: int = size(3, least=0)
    num_registers: int = size(7, least=0)
    use_swiglu_ffn: bool = False
    qkv_bias: bool = True
    layerscale_value: float = 1.0
    video_temporal_patch_size: int | None = size(None)

    def __attrs_post_init__(self) -> None:
        only(self, use_swiglu_ffn=(False,), qkv_bias=(True,), layerscale_value=(1.0,))
        if self.hidden_size % self.num_attention_heads:
            heads = self.num_attention_heads
            raise ValueError(f"num_attention_heads: {heads} do not divide {self.hidden_size}")

    @property
    def side(self) -> int:
        """The side of the square of learned positions."""
        return self.max_img_size // self.patch_size


@frozen(kw_only=True)
class _SoundConfig(ParakeetConfig):
    """`audio_config`. projection_hidden_size: width between encoder and text model."""

    projection_hidden_size: int = size(4096)
    projection_bias: bool = False


@frozen(kw_only=True)
class _Keys:
    """projector_hidden_size: width between encoder and text model. ps_version: the order of the
    tokens of a square of patches.
    """

    projector_hidden_size: int = size(4096)
    downsample_ratio: float = 0.5
    ps_version: str = "v2"

    def __attrs_post_init__(self) -> None:
        only(self, downsample_ratio=(0.5,), ps_version=("v2",))


@frozen(eq=False, kw_only=True)
class NemotronOmniConfig(MultimodalConfig):
    """config.json of Nemotron 3 Omni. normed: whether the encoder's output is normalized, by a
    norm without weights in files.
    """

    vision_type: ClassVar[type | None] = RadioConfig
    audio_type: ClassVar[type | None] = _SoundConfig
    audio_optional: ClassVar[bool] = True
    top_level_type: ClassVar[type | None] = _Keys

    normed: bool = False

    @classmethod
    def more(cls, keys: Mapping[str, Any], file: str) -> dict[str, Any]:
        """A text model with further layers that draft stands behind a last norm of the encoder."""
        return {"normed": bool((keys.get("text_config") or {}).get("num_nextn_predict_layers"))}

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        renamed = {_OLDER.get(key, key): value for key, value in table.items()}
        return super().from_table({**renamed, "architectures": [_ARCHITECTURE]}, file)


class RadioTower(Tower):
    """Encodes the patches of images of any size; each has learned tokens in front.

    films: whether patches of several frames of a video have a projection of their own.
    """

    positions: Tensor
    leading: Tensor

    def __init__(self, c: RadioConfig, b: Builder, *, films: bool = False) -> None:
        super().__init__()
        self.config, self.dtype, at = c, b.shared.dtype, b.at("patch_generator")
        hidden, values = c.hidden_size, c.num_channels * c.patch_size**2
        self.patch = at.linear("embedder", values, hidden, bias=False, split=False)
        if films:
            frames = c.video_temporal_patch_size or 1
            self.film_patch = at.linear(
                "video_embedder", frames * values, hidden, bias=False, split=False
            )
        at.parameter("pos_embed", self, "positions", (1, c.side**2, hidden))
        count = c.num_cls_tokens + c.num_registers
        at.parameter("cls_token.token", self, "leading", (count, hidden))
        shape = BlockShape(
            hidden=hidden, inner=int(hidden * c.mlp_ratio), heads=c.num_attention_heads,
            act=c.hidden_act, eps=c.layer_norm_eps, names=_NAMES,
        )  # fmt: skip
        indices = range(c.num_hidden_layers)
        self.layers = ModuleList(Block(b.at(f"blocks.{i}"), shape) for i in indices)

    def run(self, pixels: Tensor, grids: Sequence[Grid], *, film: bool = False) -> Pieces[Tensor]:
        """pixels: [patches, values per patch], row by row -> [patches, hidden]. film: patches are
        of several frames.
        """
        counts = [rows * columns for rows, columns in grids]
        parts = (self.film_patch if film else self.patch)(pixels.to(self.dtype)).split(counts)
        x = torch.cat(
            [
                piece
                for part, grid in zip(parts, grids, strict=True)
                for piece in (self.leading, part + self._positions(grid))
            ]
        )
        lengths = [len(self.leading) + count for count in counts]
        x = yield from through(self.layers, x, lengths, None)
        return torch.cat([image[len(self.leading) :] for image in x.split(lengths)])

    def _positions(self, grid: Grid) -> Tensor:
        """[patches, hidden]: a corner of the square of positions, resized to the longer side."""
        side, longest = self.config.side, max(grid)
        square = self.positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        resized = F.interpolate(square, (longest, longest), mode="bilinear")
        cropped = resized[0, :, : grid[0], : grid[1]].to(self.dtype)
        return cropped.flatten(1).T


class NemotronOmniForConditionalGeneration(MultimodalModel):
    """Nemotron 3 Omni, of images, videos, and sounds where files have an encoder of them."""

    api = 1
    config_type: ClassVar[type] = NemotronOmniConfig
    media = ("image", "video", "audio")
    names = WeightNames(
        rename=((r"^language_model\.", ""),),
        ignore=(
            r"^sound_encoder\.encoder\.feature_extractor\.",
            r"^sound_encoder\..*\.num_batches_tracked$",
            r"^vision_model\.radio_model\.(input_conditioner\.|summary_idxs$)",
        ),
    )

    def make_encoders(self, config: NemotronOmniConfig, b: Builder) -> None:
        at = b.at("vision_model.radio_model.model")
        self.tower = RadioTower(config.vision, at, films="video" in self.media)
        at, wide = b.at("mlp1"), config.vision.hidden_size * PATCHES
        self.norm = at.rms_norm("0", wide, _PROJECTOR_EPS)
        self.projector = PlainMLP(
            at, wide, config.top_level.projector_hidden_size, "relu2", bias=False,
            up="1", down="3", outputs=config.hidden_size,
        )  # fmt: skip

        if config.audio is not None:
            self._make_hearing(config, b)

    def _make_hearing(self, config: NemotronOmniConfig, b: Builder) -> None:
        self.hearing = ParakeetTower(config.audio, b.at("sound_encoder.encoder"))
        at, width = b.at("sound_projection"), config.audio.hidden_size
        self.sound_norm = at.rms_norm("norm", width, _PROJECTOR_EPS)
        self.sound_projector = PlainMLP(
            at, width, config.audio.projection_hidden_size, "relu2", up="linear1", down="linear2",
            bias=config.audio.projection_bias, outputs=config.hidden_size,
        )  # fmt: skip

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        images = [item for item in items if item.kind == "image"]
        seen = iter((yield from self._see(images)) if images else ())
        others = {}
        for index, item in enumerate(items):
            if item.kind == "audio":
                others[index] = yield from self._hear(item)
            elif item.kind == "video":
                others[index] = yield from self._watch(item)
        return [others[i] if i in others else next(seen) for i in range(len(items))]

    def _see(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels = torch.cat([self.tensor(item, "pixel_values") for item in items])
        each = [item.tensors["image_grid_hw"].reshape(-1, 2).tolist() for item in items]
        grids = [grid for item_grids in each for grid in item_grids]
        tokens = self._tokens((yield from self.tower.run(pixels, grids)), grids)
        per_item: Sequence[Tensor] = tokens.split(
            [sum(rows * columns for rows, columns in grids) // PATCHES for grids in each]
        )
        return per_item

    def _watch(self, item: MediaItem) -> Pieces[Tensor]:
        """Groups of frames are like images; the last frame fills up the last group."""
        frames, side = self.tensor(item, "pixel_values_videos"), self.config.vision.patch_size
        count = self.config.vision.video_temporal_patch_size or 1
        frames = torch.cat([frames, frames[-1:].expand(-len(frames) % count, -1, -1, -1)])
        groups = frames.reshape(-1, count * frames.shape[1], *frames.shape[2:])
        grids = [(frames.shape[2] // side, frames.shape[3] // side)] * len(groups)
        pixels = patches(groups, side).flatten(0, 1)
        return self._tokens((yield from self.tower.run(pixels, grids, film=True)), grids)

    def _tokens(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[patches, width of the encoder] -> [tokens, hidden]."""
        if self.config.normed:
            x = F.layer_norm(x, x.shape[1:], eps=self.config.vision.layer_norm_eps)
        counts = [rows * columns for rows, columns in grids]
        squares = [_squares(part, grid) for part, grid in zip(x.split(counts), grids, strict=True)]
        tokens: Tensor = self.projector(self.norm(torch.cat(squares)))
        return tokens

    def _hear(self, item: MediaItem) -> Pieces[Tensor]:
        """A token may follow the last frames: it stands for the frame that the window's middle
        adds to a spectrogram, and is masked in the encoder.
        """
        mel = self.tensor(item, "input_features")[0]
        frames = int(item.tensors["input_features_mask"].sum())
        count = self.config.audio.outputs(frames + 1)
        x = yield from self.hearing.run(mel[:frames], count)
        tokens: Tensor = self.sound_projector(self.sound_norm(x))
        return tokens

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        text = dict(NemotronHForCausalLM.tiny())
        del text["architectures"]
        return {
            "architectures": [_ARCHITECTURE],
            "model_type": "nemotron_h_omni",
            "image_token_id": 480,
            "audio_token_id": 483,
            "audio_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 48,
                "conv_kernel_size": 3,
                "convolution_bias": False,
                "subsampling_conv_channels": 8,
                "num_mel_bins": 16,
                "projection_hidden_size": 40,
                "projection_bias": False,
            },
            "vision_hidden_size": 32,
            "projector_hidden_size": 48,
            "text_config": text,
            "vision_config": {
                "model_type": "radio",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "mlp_ratio": 1.5,
                "patch_size": 4,
                "max_img_size": 32,
                "num_registers": 2,
                "video_temporal_patch_size": 2,
            },
        }


def _squares(x: Tensor, grid: Grid) -> Tensor:
    """[patches, hidden], row by row -> [tokens, 4 * hidden]."""
    rows, columns = grid
    cut = x.reshape(rows // _SIDE, _SIDE, columns // _SIDE, _SIDE, -1).transpose(1, 2)
    return cut.flatten(0, 1).flatten(1)
