"""Building blocks of models that read images and audio.

`MultimodalModel` adds encoders to a text model of another plugin. The towers are encoders that
several families share.
"""

from modulm_towers.blocks import Block, BlockNames, BlockShape, VisionAttention, patches
from modulm_towers.clip import ClipTower, TowerConfig, pixel_shuffle
from modulm_towers.conformer import ConformerConfig, ConformerTower
from modulm_towers.convolution import Convolution
from modulm_towers.deepstack import DeepStack
from modulm_towers.distances import distance_scores, distance_sines
from modulm_towers.grid import (
    axial_turns,
    grid_coordinates,
    interpolated,
    lengths_of,
    windows,
)
from modulm_towers.moonvit import MoonVit, MoonVitConfig
from modulm_towers.multimodal import (
    MultimodalConfig,
    MultimodalModel,
    cropped,
    flat_patches,
    stacked,
    tiny_text,
)
from modulm_towers.naflex import NaflexTower, Siglip2VisionConfig
from modulm_towers.navit import NavitConfig, NavitModel, NavitTower
from modulm_towers.parakeet import ParakeetConfig, ParakeetTower
from modulm_towers.pieces import Pieces, Tower, through, whole
from modulm_towers.pixtral import PixtralTower
from modulm_towers.qformer import QFormer, QFormerConfig
from modulm_towers.radio import CLIP_MEAN, CLIP_STD, RadioConfig, RadioTower
from modulm_towers.retrieval import TokenVectors, vlm_table
from modulm_towers.sam import SamConfig, SamTower
from modulm_towers.text import TEXT_NAMES, TextConfig, text_architecture
from modulm_towers.whisper import (
    WHISPER_BLOCK,
    WhisperTower,
    WhisperTowerConfig,
    encode_sounds,
    halved,
    sinusoids,
    tiny_audio,
    whisper_blocks,
    zero_key_biases,
)

__all__ = [
    "CLIP_MEAN",
    "CLIP_STD",
    "TEXT_NAMES",
    "WHISPER_BLOCK",
    "Block",
    "BlockNames",
    "BlockShape",
    "ClipTower",
    "ConformerConfig",
    "ConformerTower",
    "Convolution",
    "DeepStack",
    "MoonVit",
    "MoonVitConfig",
    "MultimodalConfig",
    "MultimodalModel",
    "NaflexTower",
    "NavitConfig",
    "NavitModel",
    "NavitTower",
    "ParakeetConfig",
    "ParakeetTower",
    "Pieces",
    "PixtralTower",
    "QFormer",
    "QFormerConfig",
    "RadioConfig",
    "RadioTower",
    "SamConfig",
    "SamTower",
    "Siglip2VisionConfig",
    "TextConfig",
    "TokenVectors",
    "Tower",
    "TowerConfig",
    "VisionAttention",
    "WhisperTower",
    "WhisperTowerConfig",
    "axial_turns",
    "cropped",
    "distance_scores",
    "distance_sines",
    "encode_sounds",
    "flat_patches",
    "grid_coordinates",
    "halved",
    "interpolated",
    "lengths_of",
    "patches",
    "pixel_shuffle",
    "sinusoids",
    "stacked",
    "text_architecture",
    "through",
    "tiny_audio",
    "tiny_text",
    "vlm_table",
    "whisper_blocks",
    "whole",
    "windows",
    "zero_key_biases",
]
