"""Hook: refuse what the TPU platform does not support, before a model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.errors import PluginError, UnsupportedError
from modulm.plugins import Proposal, hookimpl, manager
from modulm_platform_tpu.devices import look
from modulm_platform_tpu.settings import AUTO, LOOKUPS, drafter_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.config import EngineConfig

__all__ = [
    "DRAFTERS", "REFUSED", "modulm_config_final", "modulm_config_proposals", "runs_on_tpu",
]  # fmt: skip

#: Flags that must keep their default: why, and what to use instead.
REFUSED = {
    "batch_invariant": "all steps are padded to few sizes; use CPUs or GPUs (--device)",
    "decode_context_parallel_size": "caches are split by heads; use --tensor-parallel-size",
    "enable_eplb": "experts stay on their devices; use --enable-expert-parallel alone",
    "enforce_eager": "all steps run as compiled programs; use --optimization-level 0 to compile "
    "them when they are needed",
    "kv_offloading_size": "its caches cannot be copied to the host; use --kv-cache-dtype int8 or "
    "fp8 to fit more",
    "kv_transfer_config": "its caches cannot be copied to the host; use --data-parallel-size for "
    "more replicas",
    "pipeline_parallel_size": "all devices compute each layer; use --tensor-parallel-size",
    "weight_transfer_config": "weights are arguments of its programs; use sleep level 2 and "
    "wake_up to load changed files",
}
#: Drafters that run, by the names of their drivers.
DRAFTERS = (*LOOKUPS, "dflash", "draft_model", "eagle", "eagle3", "medusa", "mtp")


@hookimpl
def modulm_config_proposals(config: EngineConfig) -> Sequence[Proposal]:
    """Run one worker for all devices, which its programs are split over."""
    parallel = config.parallel
    if not runs_on_tpu(config) or parallel.distributed_executor_backend is not None:
        return ()
    if parallel.tensor_parallel_size == 1:
        return ()
    reason = "one process drives all devices of a TPU host"
    return (Proposal("distributed_executor_backend", "uni", reason),)


@hookimpl
def modulm_config_final(config: EngineConfig) -> None:
    """Refuse flags. On a machine with a TPU the platform may be chosen without naming it."""
    if not runs_on_tpu(config):
        return
    for spec, value in config.values():
        if spec.name in REFUSED and value != spec.default and value:
            raise _refusal(spec.name, REFUSED[spec.name])
    drafter, parallel = drafter_of(config), config.parallel
    if drafter not in (None, AUTO) and _driver_name(str(drafter)) not in DRAFTERS:
        message = f"drafts of {drafter}; supported are {', '.join(DRAFTERS)}"
        raise _refusal("speculative_config", message)
    if parallel.shared_experts:
        message = (
            "with several replicas, each has all experts; use --tensor-parallel-size for as many "
            "devices, without --data-parallel-size"
        )
        raise _refusal("enable_expert_parallel", message)
    if parallel.distributed_executor_backend not in (None, "uni", "ray"):
        message = "one process drives all devices of a machine; leave it out, or use ray"
        raise _refusal("distributed_executor_backend", message)


def runs_on_tpu(config: EngineConfig) -> bool:
    """Whether the engine runs on this platform."""
    device = config.device.device
    return device == "tpu" or (device in (None, "auto") and look()[0] > 1)


def _driver_name(method: str) -> str:
    """Return the name of a method's driver: methods may have several names."""
    try:
        name: str = manager.current().load("speculators", method).name
    except PluginError:
        return method
    return name


def _refusal(name: str, why: str) -> UnsupportedError:
    return UnsupportedError(f"{name}: not supported on tpu yet: {why}")
