"""Flags of weights in host memory, with vLLM's names."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group
from modulm.errors import ConfigError

__all__ = ["OffloadConfig"]


@flag_group
class OffloadConfig(FlagGroup):
    """Weights of a device that stay in host memory."""

    title = "OffloadConfig"

    cpu_offload_gb: float = flag(
        0.0,
        "Weights of layers to keep in host memory, per rank, which the device reads where they are "
        "(or copies, if it cannot).",
        unit="GiB",
        least=0.0,
    )
    cpu_offload_params: tuple[str, ...] = flag(
        (),
        "Segments of the names of the weights that --cpu-offload-gb may move, for example "
        "mlp.down_proj or experts. Default: all of the layers.",
    )
    offload_backend: str = flag(
        "auto",
        "How weights in host memory are used. uva: read by the device where they are "
        "(--cpu-offload-gb). prefetch: copied before their layer runs (--offload-group-size). "
        "auto: prefetch if that is set.",
        choices=("auto", "uva", "prefetch"),
    )
    offload_group_size: int = flag(
        0,
        "Size of the groups of layers of which the last --offload-num-in-group ones stay in host "
        "memory and are copied to the device before they run; 0: none.",
        unit="layers",
        least=0,
    )
    offload_num_in_group: int = flag(
        1, "Layers per group that stay in host memory.", unit="layers", least=1
    )
    offload_prefetch_step: int = flag(
        1,
        "Number of layers that are copied ahead, each of which has a buffer on the device.",
        unit="layers",
        least=0,
    )
    offload_params: tuple[str, ...] = flag(
        (),
        "Segments of the names of the weights that are copied, as in --cpu-offload-params. "
        "Default: all of the layers.",
    )
    cpu_offload_experts: int = flag(
        0,
        "Experts per mixture that stay in host memory and are computed on the CPU: those that "
        "tokens use least.",
        least=0,
    )
    cpu_offload_experts_interval: int = flag(
        256,
        "Steps after which experts change their places if others were used more; 0: never.",
        unit="steps",
        least=0,
    )

    @property
    def backend(self) -> str:
        """uva or prefetch; "" if layers stay on the device."""
        chosen = self.offload_backend
        if chosen == "auto":
            chosen = "prefetch" if self.offload_group_size else "uva"
        amount = self.offload_group_size if chosen == "prefetch" else self.cpu_offload_gb
        return chosen if amount else ""

    @property
    def is_used(self) -> bool:
        """Whether any weights are to stay in host memory."""
        return bool(self.backend or self.cpu_offload_experts)

    @property
    def first_flag(self) -> str:
        """A flag that requests it, for messages."""
        if self.cpu_offload_experts:
            return "cpu_offload_experts"
        return "offload_group_size" if self.backend == "prefetch" else "cpu_offload_gb"

    def check(self) -> None:
        """Raise ConfigError for flags that contradict one another or have no effect."""
        backend, group, inside = self.backend, self.offload_group_size, self.offload_num_in_group
        if self.offload_backend == "prefetch" and not group:
            raise ConfigError("offload_backend", "prefetch: set --offload-group-size")
        if self.offload_backend == "uva" and not self.cpu_offload_gb:
            raise ConfigError("offload_backend", "uva: set --cpu-offload-gb")
        if backend == "prefetch" and inside > group:
            raise ConfigError(
                "offload_num_in_group", f"{inside} is more than --offload-group-size {group}"
            )
        if backend == "prefetch" and not self.offload_prefetch_step:
            raise ConfigError("offload_prefetch_step", "must be at least 1 for prefetch")
        for name, values, needed in (
            ("cpu_offload_params", self.cpu_offload_params, "uva"),
            ("offload_params", self.offload_params, "prefetch"),
        ):
            if values and backend != needed:
                flags = {"uva": "--cpu-offload-gb", "prefetch": "--offload-group-size"}
                raise ConfigError(name, f"has no effect without {flags[needed]}")
