"""The configuration of the adapter bank."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen
from attrs.validators import ge, in_, le

from modulm.errors import ConfigError

__all__ = ["DTYPES", "LoraOptions"]

MOST_RANK = 512
DTYPES = ("auto", "float32", "float16", "bfloat16")


def _enough(options: LoraOptions, attribute: Attribute[Any], value: int | None) -> None:
    if value is not None and value < options.max_loras:
        raise ConfigError("max_cpu_loras", f"{value} is less than max_loras {options.max_loras}")


@frozen
class LoraOptions:
    """Options of the bank.

    max_loras: adapters per step. max_lora_rank: maximum rank. max_cpu_loras: adapters in host
    memory, None for as many as per step. lora_dtype: of their weights, "auto" for the layer's.
    lora_target_modules: suffixes of the modules that adapters may change, None for all.
    fully_sharded_loras has an effect only if several ranks share a model.
    """

    max_loras: int = field(default=1, validator=ge(1))
    max_lora_rank: int = field(default=16, validator=[ge(1), le(MOST_RANK)])
    max_cpu_loras: int | None = field(default=None, validator=_enough)
    lora_dtype: str = field(default="auto", validator=in_(DTYPES))
    lora_target_modules: tuple[str, ...] | None = None
    fully_sharded_loras: bool = False

    @property
    def host_adapters(self) -> int:
        """Adapters in host memory."""
        return self.max_cpu_loras or self.max_loras
