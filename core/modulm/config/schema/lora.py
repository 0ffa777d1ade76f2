"""Low-rank adapters beside the model's own weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.config.schema.flags import equip, flag, later, refused

__all__ = ["LoRAConfig"]

_LATER = later("LoRA adapters")


@frozen(kw_only=True, field_transformer=equip)
class LoRAConfig:
    """Low-rank adapters beside the model's own weights."""

    TITLE: ClassVar[str] = "LoRAConfig"
    TABLE: ClassVar[str | None] = None

    enable_lora: bool | None = flag(None, "Serve adapters beside the model.", state=_LATER)
    max_loras: int = flag(1, "Adapters in one batch.", least=1, state=_LATER)
    max_lora_rank: int = flag(16, "Largest rank of an adapter.", least=1, state=_LATER)
    lora_dtype: str = flag("auto", "Number format of adapters.", state=_LATER)
    max_cpu_loras: int | None = flag(None, "Adapters kept in host memory.", least=1, state=_LATER)
    fully_sharded_loras: bool = flag(False, "Share adapters out like weights.", state=_LATER)
    lora_target_modules: tuple[str, ...] | None = flag(
        None, "Modules that adapters may change.", state=_LATER
    )
    default_mm_loras: Mapping[str, Any] | None = flag(
        None, "Adapter for each kind of media.", state=_LATER
    )
    enable_tower_connector_lora: bool = flag(False, "Adapters on encoders too.", state=_LATER)
    specialize_active_lora: bool = flag(
        False, "Kernels for the number of active adapters.", state=_LATER
    )
    enable_mixed_moe_lora_format: bool = flag(
        False, "Adapters of expert layers in two forms.", state=_LATER
    )
    enable_moe_shared_loras: bool = flag(False, "Adapters shared by experts.", state=_LATER)
    max_lora_cls_labels: int | None = flag(
        None, "Labels of adapters that classify.", least=1, state=_LATER
    )
    enable_lora_bias: bool = flag(
        False, "Adapters with a bias.", deprecated="adapters with a bias are gone",
        state=refused("retrain the adapter without a bias"),
    )  # fmt: skip
    lora_extra_vocab_size: int = flag(
        256, "Tokens that an adapter may add.", deprecated="adapters no longer add tokens",
        state=refused("resize the model's own vocabulary"),
    )  # fmt: skip
    long_lora_scaling_factors: tuple[str, ...] | None = flag(
        None, "Adapters for longer contexts.", state=refused("use --hf-overrides")
    )
