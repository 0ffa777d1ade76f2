"""Hook: refuse what the TPU platform does not support, before a model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.errors import UnsupportedError
from modulm.plugins import hookimpl
from modulm_platform_tpu.devices import look

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["REFUSED", "modulm_config_final"]

#: Flags that must keep their default, and why.
REFUSED = {
    "batch_invariant": "all steps are padded to few sizes",
    "data_parallel_size": "one process uses one chip",
    "decode_context_parallel_size": "one process uses one chip",
    "enable_eplb": "one process uses one chip",
    "enable_expert_parallel": "one process uses one chip",
    "enable_lora": "adapters are not part of its programs",
    "enable_prompt_embeds": "embeddings of prompts are not part of its programs",
    "enforce_eager": "all steps run as compiled programs",
    "kv_offloading_size": "its caches cannot be copied to the host",
    "kv_transfer_config": "its caches cannot be copied to the host",
    "pipeline_parallel_size": "one process uses one chip",
    "speculative_config": "drafts are not part of its programs",
    "tensor_parallel_size": "one process uses one chip",
    "weight_transfer_config": "weights are arguments of its programs",
}


@hookimpl
def modulm_config_final(config: EngineConfig) -> None:
    """Refuse flags. On a machine with a TPU the platform may be chosen without naming it."""
    device = config.device.device
    if device != "tpu" and (device != "auto" or look()[0] <= 1):
        return
    for spec, value in config.values():
        if spec.name in REFUSED and value != spec.default and value:
            raise UnsupportedError(f"{spec.name}: not supported on tpu yet: {REFUSED[spec.name]}")
