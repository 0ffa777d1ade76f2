"""The bank's table of the configuration."""

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
    """max_loras: adapters in one step; max_lora_rank: the largest rank that is taken;
    max_cpu_loras: adapters in host memory, None: as many as in a step; lora_dtype: of their
    weights, "auto": the layer's; lora_target_modules: the modules that adapters change here, by the
    ends of their names, None: all that an adapter changes. fully_sharded_loras only means something
    where several ranks share a model.
    """

    max_loras: int = field(default=1, validator=ge(1))
    max_lora_rank: int = field(default=16, validator=[ge(1), le(MOST_RANK)])
    max_cpu_loras: int | None = field(default=None, validator=_enough)
    lora_dtype: str = field(default="auto", validator=in_(DTYPES))
    lora_target_modules: tuple[str, ...] | None = None
    fully_sharded_loras: bool = False

    @property
    def kept(self) -> int:
        """Adapters in host memory."""
        return self.max_cpu_loras or self.max_loras
