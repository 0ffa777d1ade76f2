"""Flags of adapters, with vLLM's names."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group
from modulm.errors import ConfigError

__all__ = ["LoRAConfig"]


@flag_group
class LoRAConfig(FlagGroup):
    """Adapters (LoRA) that requests choose by name, beside the model."""

    title = "LoRAConfig"

    enable_lora: bool = flag(False, "Take adapters (LoRA).", common=True)
    max_loras: int = flag(1, "Most different adapters in one step.", least=1, common=True)
    max_lora_rank: int = flag(16, "Largest rank of an adapter.", least=1, most=512)
    max_cpu_loras: int | None = flag(
        None, "Most adapters in host memory; None: 32, or as many as --max-loras.", least=1
    )
    lora_dtype: str = flag(
        "auto", "Data type of adapters; auto: the model's.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )  # fmt: skip
    lora_target_modules: tuple[str, ...] | None = flag(
        None, "Parts of the model that adapters may change, by the ends of their names; None: all."
    )
    fully_sharded_loras: bool = flag(
        False, "Split both halves of adapters over ranks; on one rank there is nothing to split."
    )

    def __attrs_post_init__(self) -> None:
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                "max_cpu_loras", f"{self.max_cpu_loras} is less than max_loras, {self.max_loras}"
            )
