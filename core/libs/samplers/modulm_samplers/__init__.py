"""Sampling settings that requests give by llama.cpp's names, each served by a package."""

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
