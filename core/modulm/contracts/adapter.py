"""Adapter bank: low-rank and similar changes to layers, per row (group `modulm.adapters`).

A bank has numbered slots; slot 0 is the model without adapter. It may wrap each layer when the
layer is built, and is told before each pass which slot each token uses. A driver is enabled by a
table in the configuration: `--plugin-config '{"adapters": {"NAME": {...}}}'`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    import numpy as np
    import torch

    from modulm.contracts.kernels import Ops
    from modulm.contracts.platform import Platform
    from modulm.contracts.quantization import LinearSpec

__all__ = ["API", "AdaptedExperts", "AdaptedLayer", "AdapterBank", "Naming"]

API = 1

#: (stored name, tensor) -> the model's names and tensors (`modulm.nn.WeightNames.apply`).
Naming: TypeAlias = "Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]"


class AdaptedLayer(ABC):
    """A bank's wrapper of one linear layer or embedding table, using the slots of the step."""

    @abstractmethod
    def apply(
        self,
        base: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Apply the layer: [tokens, inputs of this rank] -> [tokens, outputs of this rank].

        `base(x, bias)` is the layer without adapters. If the layer is split by inputs, results are
        summed over ranks afterwards, and bias is None on all ranks but the first.
        """

    def embed(
        self, base: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor
    ) -> torch.Tensor:
        """Look up ids, [tokens] int64 -> [tokens, hidden]. `base(ids)`: without adapters."""
        return base(ids)

    def finish(self, base: Callable[..., torch.Tensor]) -> None:
        """Called once the layer's weights are loaded.

        base: as in `apply`, or as in `embed` for tables; may be called from now on, on any thread.
        """

    def bypass(self) -> None:
        """Called if the model uses the layer's weight without `apply`, bypassing adapters."""


class AdaptedExperts(Protocol):
    """A bank's wrapper of the op `fused_experts` of a layer; `base` is the op."""

    def __call__(
        self,
        base: Callable[..., torch.Tensor],
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        gate_up: object,
        down: object,
        **more: object,
    ) -> torch.Tensor: ...


class AdapterBank(ABC):
    """The adapters of one model. `Config`: its options (attrs, frozen)."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    Config: ClassVar[type]

    def __init__(self, config: object, platform: Platform, ops: Ops) -> None:
        self.config = config
        self.platform = platform
        self.ops = ops

    @property
    @abstractmethod
    def slots(self) -> int:
        """Maximum number of adapters in a step, not counting slot 0."""

    @abstractmethod
    def layer(self, spec: LinearSpec) -> AdaptedLayer | None:
        """Return a wrapper for a layer that is being built, or None to leave it unchanged.

        Memory for the slots is allocated here, or when the first adapter is added.
        """

    def experts(self, gate_up: LinearSpec, down: LinearSpec) -> AdaptedExperts | None:
        """Return a wrapper for a pair of stacked experts, or None."""
        return None

    def norm(self, name: str, norm: Any) -> Any:
        """Return what the model uses in place of a norm (`modulm.nn.Norm`), or the norm itself."""
        return norm

    def elsewhere(self, spec: LinearSpec) -> None:
        """Called for each layer of other pipeline stages; ignore adapter weights for it."""

    def open(self, names: Naming) -> None:
        """Called once the model's weights are loaded.

        names: maps names and layouts of the model's checkpoints, which adapters use as well.
        """

    def renew(self) -> None:
        """Recompute what depends on the model's weights (DoRA) after they have changed."""

    @abstractmethod
    def add(self, name: str, path: Path) -> None:
        """Read an adapter into host memory under `name`, replacing an earlier one.

        Called on any thread while steps run. A slot that holds `name` has the new values from the
        next step on. Raises CheckpointError naming the file and what does not fit, without changes.
        """

    def prepare(self, name: str) -> None:
        """Reload an added adapter into host memory if it was evicted. Otherwise like `add`."""

    def replace(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Check new tensors, by the names of its files, for all added versions `NAME@...`.

        The returned function puts them in place, between two steps. Settings stay. Raises
        CheckpointError naming what does not fit, UnsupportedError if the bank cannot.
        """
        raise UnsupportedError(f"adapters of {self.name}: new tensors are not supported yet")

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove an adapter; a slot that holds it keeps its values until it is filled again.

        Called on any thread. Raises EngineError for an unknown name.
        """

    @abstractmethod
    def fill(self, slot: int, name: str) -> None:
        """Copy an added adapter into a slot, counted from 1. Called between steps."""

    @abstractmethod
    def begin(self, slots: torch.Tensor | None) -> None:
        """Set the slots that `apply` uses: [tokens] int32, or None if no token uses an adapter.

        Called before each pass of the model (`Batch.adapters`), and before logits with the slots of
        their rows.
        """

    def begin_known(self, slots: np.ndarray | None, sent: torch.Tensor | None) -> None:
        """Call `begin` with the slots also on the host; `sent` is the argument of `begin`.

        Override it to read the slots without waiting for the device.
        """
        self.begin(sent)

    def memory(self) -> int:
        """Return the bytes that adapters of the largest rank may take on this rank, if all are
        loaded; called once the layers are built, for estimates. 0 if unknown.
        """
        return 0

    def can_record(self, slots: Collection[int], tokens: int) -> bool:
        """Whether passes of so many tokens that use these slots may be recorded and replayed.

        After `begin`, the layers' work must then consist of ops that read everything that differs
        between passes of equal size from tensors at fixed addresses.
        """
        return False
