"""Step 3 VL 10B: a Perception Encoder (arXiv 2504.13181) on windows and the image, and Qwen 3."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import AttentionNames, only, size
from modulm_towers import (
    Block,
    BlockNames,
    BlockShape,
    Convolution,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    Tower,
    axial_turns,
    flat_patches,
    grid_coordinates,
    patches,
    through,
    tiny_text,
)

__all__ = [
    "PerceptionConfig",
    "PerceptionTower",
    "StepVLConfig",
    "StepVLForConditionalGeneration",
    "joined",
]

_EPS = 1e-5


@frozen(kw_only=True)
class PerceptionConfig:
    """`vision_config`. image_size: pixels of a side that has a position for each patch."""

    width: int = size(1536)
    layers: int = size(47)
    heads: int = size(16)
    image_size: int = size(728)
    patch_size: int = size(14)
    mlp_ratio: float = 8960 / 1536
    hidden_act: str = "quick_gelu"
    ls_init_value: float | None = 0.1
    use_cls_token: bool = False
    use_abs_posemb: bool = True
    use_rope2d: bool = True
    use_ln_pre: bool = True
    use_ln_post: bool = False

    def __attrs_post_init__(self) -> None:
        implemented: dict[str, tuple[bool, ...]] = {
            "use_cls_token": (False,), "use_abs_posemb": (True,), "use_rope2d": (True,),
            "use_ln_pre": (True,),
        }  # fmt: skip
        only(self, **implemented)
        if self.width % self.heads or self.width // self.heads % 4:
            raise ValueError(f"heads: {self.heads} do not divide {self.width} by fours")

    @property
    def side(self) -> int:
        """The side of the square of learned positions."""
        return self.image_size // self.patch_size


class PerceptionTower(Tower):
    """Encodes square images of one size; two convolutions leave a token of 16 patches."""

    positions: Tensor

    def __init__(self, c: PerceptionConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype = c, b.shared.dtype
        self.patch = b.linear("conv1", 3 * c.patch_size**2, c.width, bias=False, split=False)
        b.parameter("positional_embedding", self, "positions", (c.side**2, c.width))
        self.pre = b.layer_norm("ln_pre", c.width, _EPS)
        shape = BlockShape(
            hidden=c.width, inner=int(c.width * c.mlp_ratio), heads=c.heads, act=c.hidden_act,
            eps=_EPS, neox=False,
            scales=None if c.ls_init_value is None else ("ls_1.gamma", "ls_2.gamma"),
            names=BlockNames(
                norm1="ln_1", attn="attn", norm2="ln_2", up="c_fc", down="c_proj",
                projections=AttentionNames("q_proj", "k_proj", "v_proj", "out_proj", "qkv"),
            ),
        )  # fmt: skip
        at = b.at("transformer.resblocks")
        self.layers = ModuleList(Block(at.at(str(i)), shape) for i in range(c.layers))
        self.post = b.layer_norm("ln_post", c.width, _EPS) if c.use_ln_post else None
        widths = (c.width, 2 * c.width, 4 * c.width)
        self.convolutions = ModuleList(
            Convolution(
                b, f"vit_downsampler{i + 1}", *widths[i : i + 2], (3, 3), stride=2, padding=1
            )
            for i in range(2)
        )

    def run(self, pixels: Tensor) -> Pieces[Tensor]:
        """[n, 3, side, side] -> [n, tokens, 4 * width]."""
        c = self.config
        cut = patches(pixels.to(self.dtype), c.patch_size)
        rows, columns = (length // c.patch_size for length in pixels.shape[2:])
        x = self.patch(cut.flatten(0, 1)).view(cut.shape[0], cut.shape[1], -1)
        x = self.pre((x + self._positions(rows, columns)).flatten(0, 1))
        # Angles of columns come before those of rows.
        coordinates = grid_coordinates((1, rows, columns), 1).flip(-1)
        turns = axial_turns(coordinates, c.width // c.heads).to(x.device)
        turns = turns.repeat(len(pixels), 1)
        x = yield from through(self.layers, x, [rows * columns] * len(pixels), turns)
        x = x if self.post is None else self.post(x)
        x = x.view(len(pixels), rows, columns, -1).permute(0, 3, 1, 2)
        for convolution in self.convolutions:
            x = convolution(x)
        return x.flatten(2).transpose(1, 2)

    def _positions(self, rows: int, columns: int) -> Tensor:
        """[patches, width]: learned positions, interpolated bilinearly."""
        side = self.config.side
        if (rows, columns) == (side, side):
            return self.positions
        square = self.positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        resized = F.interpolate(square, (rows, columns), mode="bilinear")
        return resized[0].flatten(1).T.to(self.dtype)


@frozen(eq=False, kw_only=True)
class StepVLConfig(MultimodalConfig):
    """config.json of Step 3 VL."""

    vision_type: ClassVar[type | None] = PerceptionConfig

    projector_bias: bool = True

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        text, vision = table.get("text_config"), table.get("vision_config")
        if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
            raise CheckpointError(f"{file}: text_config, vision_config: must be tables")
        return cls(
            text=TextConfig.from_table(table, file),
            vision=read_config(vision, PerceptionConfig, file),
            projector_bias=bool(table.get("projector_bias", True)),
        )


def joined(
    model: MultimodalModel, items: Sequence[MediaItem], tokens: Callable[[Tensor], Pieces[Tensor]]
) -> Pieces[Sequence[Tensor]]:
    """[n, hidden] per item: the tokens of its windows, and those of the whole image."""
    wholes = yield from tokens(torch.cat([model.tensor(item, "pixel_values") for item in items]))
    embeddings = []
    for item, whole in zip(items, wholes, strict=True):
        windows = whole[:0]
        if "pixel_values_local" in item.tensors:
            part = yield from tokens(model.tensor(item, "pixel_values_local"))
            windows = part.flatten(0, 1)
        embeddings.append(torch.cat([windows, whole]))
    return embeddings


class StepVLForConditionalGeneration(MultimodalModel):
    """Step 3 VL 10B."""

    api = 1
    config_type: ClassVar[type] = StepVLConfig

    def make_encoders(self, config: StepVLConfig, b: Builder) -> None:
        self.tower = PerceptionTower(config.vision, b.at("vision_model"))
        self.projector = b.linear(
            "vit_large_projector", 4 * config.vision.width, config.hidden_size,
            bias=config.projector_bias, split=False,
        )  # fmt: skip

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        return (yield from joined(self, items, self._tokens))

    def _tokens(self, pixels: Tensor) -> Pieces[Tensor]:
        """[n, 3, side, side] -> [n, tokens, hidden of the text model]."""
        x = yield from self.tower.run(pixels)
        tokens: Tensor = self.projector(x.flatten(0, 1))
        return tokens.view(len(x), x.shape[1], -1)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        rename = (
            (r"^model\.(vision_model|vit_large_projector)\.", r"\1."),
            (r"^vision_model\.(.*)\.attn\.in_proj_(weight|bias)$", r"vision_model.\1.attn.qkv.\2"),
        )
        return evolve(
            names,
            rename=(*rename, *names.rename),
            rewrite=(flat_patches(r"^vision_model\.conv1\.weight$"), *names.rewrite),
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["StepVLForConditionalGeneration"],
            "model_type": "step_robotics",
            "image_token_id": 480,
            "projector_bias": False,
            "text_config": {**tiny_text("qwen3", head_dim=16), "tie_word_embeddings": False},
            "vision_config": {
                "width": 32,
                "layers": 2,
                "heads": 2,
                "image_size": 64,
                "patch_size": 4,
                "mlp_ratio": 1.5,
                "ls_init_value": 0.1,
            },
        }
