"""llama.cpp's sampling settings in requests; a logits-processor package implements each of them."""

from modulm_samplers.arguments import SAMPLERS, Sampler, sampler_arguments, unserved
from modulm_samplers.processor import SettingsProcessor, number

__all__ = [
    "SAMPLERS",
    "Sampler",
    "SettingsProcessor",
    "number",
    "sampler_arguments",
    "unserved",
]
