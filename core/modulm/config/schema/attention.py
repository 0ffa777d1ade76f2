"""Which attention backend and which kernels compute the layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.config.schema.flags import equip, flag, later, no_effect

__all__ = ["AttentionConfig"]

_OTHER = no_effect("the option belongs to a backend that is not installed")
_KERNELS = no_effect("kernels are bound from the installed providers; see --kernels")


@frozen(kw_only=True, field_transformer=equip)
class AttentionConfig:
    """Which attention backend and which kernels compute the layers."""

    TITLE: ClassVar[str] = "AttentionConfig"
    TABLE: ClassVar[str | None] = "attention_config"

    attention_backend: str | None = flag(
        None, "Attention backend; None: the platform's first that fits.", kind="attention",
        key="backend",
    )  # fmt: skip
    attention_options: Mapping[str, Any] = flag(
        {}, "Options of the attention backend, checked by it.", key="options"
    )
    kernels: tuple[str, ...] | None = flag(
        None,
        "Kernel providers in order of preference; none takes plain torch.",
        kind="kernels",
        choices=("none",),
    )
    backend_per_kind: Mapping[str, Any] = flag(
        {}, "A backend for each kind of layer.", key="backend_per_kind", own=False,
        state=later("a backend for each kind of layer"),
    )  # fmt: skip
    flash_attn_version: int | None = flag(
        None, "Version of one backend.", key="flash_attn_version", own=False, state=_OTHER
    )
    use_trtllm_attention: bool | None = flag(
        None, "Prefer one backend's kernels.", key="use_trtllm_attention", own=False, state=_OTHER
    )
    kernel_config: Mapping[str, Any] = flag(
        {}, "Which kernel computes which operation.", state=_KERNELS
    )
    ir_op_priority: Mapping[str, Any] = flag({}, "Order of providers by operation.", state=_KERNELS)
    moe_backend: str = flag("auto", "Kernels of expert layers.", state=_KERNELS)
    linear_backend: str = flag("auto", "Kernels of linear layers.", state=_KERNELS)
    sparse_indexer_topk_backend: str = flag("auto", "Kernels of sparse indexes.", state=_KERNELS)
    enable_flashinfer_autotune: bool | None = flag(None, "Tune one provider.", state=_KERNELS)
    monokernel: bool = flag(False, "Run a layer as one kernel.", state=_KERNELS)
    gdn_prefill_backend: str | None = flag(None, "Kernels of gated delta layers.", state=_KERNELS)
    kda_prefill_backend: str | None = flag(None, "Kernels of delta layers.", state=_KERNELS)
    kda_decode_backend: str | None = flag(None, "Kernels of delta layers.", state=_KERNELS)
