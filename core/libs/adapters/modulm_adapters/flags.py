"""Flags of adapters, with vLLM's names."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group
from modulm.errors import ConfigError

__all__ = ["LoRAConfig"]


@flag_group
class LoRAConfig(FlagGroup):
    """LoRA adapters, which requests choose by name."""

    title = "LoRAConfig"

    enable_lora: bool = flag(False, "Enable LoRA adapters.", common=True)
    max_loras: int = flag(
        1, "Maximum number of different adapters in a step.", least=1, common=True
    )
    max_lora_rank: int = flag(16, "Maximum rank of an adapter.", least=1, most=512)
    max_cpu_loras: int | None = flag(
        None,
        "Maximum adapters in host memory. Default: 32, or --max-loras if that is more.",
        least=1,
    )
    lora_dtype: str = flag(
        "auto", "Data type of adapters; auto: the model's.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )  # fmt: skip
    lora_target_modules: tuple[str, ...] | None = flag(
        None, "Modules that adapters may change, by the ends of their names. Default: all."
    )
    fully_sharded_loras: bool = flag(
        False, "Split both matrices of an adapter over ranks. No effect on a single rank."
    )

    def __attrs_post_init__(self) -> None:
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                "max_cpu_loras", f"{self.max_cpu_loras} is less than max_loras, {self.max_loras}"
            )
