"""Parts of causal codecs and of decoders over the codes of one frame, for packages of models."""

from modulm_speakers.codec.causal import (
    CausalConvolution,
    CausalDecoder,
    CausalUpsampling,
    Float32Module,
    Past,
    Window,
)
from modulm_speakers.codec.frames import FrameAttention, FrameDecoder, FrameLayer

__all__ = [
    "CausalConvolution",
    "CausalDecoder",
    "CausalUpsampling",
    "Float32Module",
    "FrameAttention",
    "FrameDecoder",
    "FrameLayer",
    "Past",
    "Window",
]
