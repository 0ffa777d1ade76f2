"""What models that read images and sound are made of.

`MultimodalModel` is a text model of another plugin with encoders around it; the towers are the
encoders that families share.
"""

from modulm_towers.blocks import Block, BlockNames, BlockShape, VisionAttention, attend, patches
from modulm_towers.clip import ClipTower, TowerConfig, pixel_shuffle
from modulm_towers.grid import (
    axial_turns,
    grid_places,
    grid_positions,
    interpolated,
    lengths_of,
    windows,
)
from modulm_towers.multimodal import (
    MultimodalConfig,
    MultimodalModel,
    cropped,
    flat_patches,
    stacked,
    tiny_text,
)
from modulm_towers.pixtral import PixtralTower
from modulm_towers.text import TEXT_NAMES, TextConfig, text_architecture

__all__ = [
    "TEXT_NAMES",
    "Block",
    "BlockNames",
    "BlockShape",
    "ClipTower",
    "MultimodalConfig",
    "MultimodalModel",
    "PixtralTower",
    "TextConfig",
    "TowerConfig",
    "VisionAttention",
    "attend",
    "axial_turns",
    "cropped",
    "flat_patches",
    "grid_places",
    "grid_positions",
    "interpolated",
    "lengths_of",
    "patches",
    "pixel_shuffle",
    "stacked",
    "text_architecture",
    "tiny_text",
    "windows",
]
