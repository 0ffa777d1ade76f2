"""Adapter bank: small changes to a model's layers, other ones for each row (`modulm.adapters`).

A bank has numbered slots; slot 0 is the model as it is. It is told of every layer that is built
and may put itself around it, and before each pass which slot each token uses. A driver is in use
where the configuration has a table for it: `--plugin-config '{"adapters": {"NAME": {...}}}'`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import numpy as np
    import torch

    from modulm.contracts.kernels import Ops
    from modulm.contracts.platform import Platform
    from modulm.contracts.quantization import LinearSpec

__all__ = ["API", "AdaptedExperts", "AdaptedLayer", "AdapterBank", "Naming"]

API = 1

#: (stored name, tensor) -> what it gives by the model's names (`modulm.nn.WeightNames.apply`).
Naming: TypeAlias = "Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]"


class AdaptedLayer(ABC):
    """What a bank does around one linear layer or table, with the slots of the step."""

    @abstractmethod
    def apply(
        self,
        base: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """x: [tokens, inputs of this rank] -> [tokens, outputs of this rank].

        `base(x, bias)` is the layer without adapters. In a layer that is cut by inputs the result
        is added up over ranks afterwards; its bias is None on all ranks but the first.
        """

    def embed(
        self, base: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor
    ) -> torch.Tensor:
        """ids: [tokens] int64 -> [tokens, hidden], of a table; `base(ids)` without adapters."""
        return base(ids)

    def finish(self, base: Callable[..., torch.Tensor]) -> None:
        """Called once the layer has its weights; `base` is as `apply` or, of a table, `embed` has
        it. It may be called from then on, from any thread.
        """

    def bypass(self) -> None:
        """Called where a model takes the layer's weight and computes with it otherwise than by
        `apply`: adapters of this layer cannot work.
        """


class AdaptedExperts(Protocol):
    """What a bank does around the op `fused_experts` of a layer; `base` is the op."""

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
    """The adapters of one model. `Config` (attrs, frozen) is its table of the configuration."""

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
        """How many adapters a step may use, slot 0 not counted: `Capacity.adapters`."""

    @abstractmethod
    def layer(self, spec: LinearSpec) -> AdaptedLayer | None:
        """Called for each layer that is built; None leaves it as it is, at no cost.

        `spec` has its kind, its name, the names and sizes of its parts and what of them this rank
        holds. Memory for the slots is made here or when the first adapter comes.
        """

    def experts(self, gate_up: LinearSpec, down: LinearSpec) -> AdaptedExperts | None:
        """The same for a pair of stacks of experts."""
        return None

    def elsewhere(self, spec: LinearSpec) -> None:
        """Called for each layer that another pipeline stage has: what adapters change of it is none
        of this rank's business.
        """

    def open(self, names: Naming) -> None:
        """Called once the model has its weights; `names` are the rules for names and layouts of
        its checkpoints, by which adapters name what they change.
        """

    def renew(self) -> None:
        """The model's weights have changed: prepare again what depends on them (DoRA)."""

    @abstractmethod
    def add(self, name: str, path: Path) -> None:
        """Read an adapter into host memory under `name`, or anew.

        Called from any thread, while steps run. A slot that holds `name` already has the new values
        from the next step on. Raises CheckpointError naming the file and what does not fit;
        nothing has changed then.
        """

    def prepare(self, name: str) -> None:
        """Have an added adapter in host memory again, if it had to leave it. As `add` otherwise."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Forget an adapter; a slot that it is in keeps its values until it is filled again.

        Called from any thread. Raises EngineError if there is none of this name.
        """

    @abstractmethod
    def fill(self, slot: int, name: str) -> None:
        """Put an added adapter into a slot, from 1 (`Plan.adapters`). Runs between steps."""

    @abstractmethod
    def begin(self, slots: torch.Tensor | None) -> None:
        """Called before each pass of the model with `Batch.adapters`: [tokens] int32, or None if
        no token uses one; and before logits, with the slots of the rows whose logits they are.
        """

    def begin_known(self, slots: np.ndarray | None, sent: torch.Tensor | None) -> None:
        """`begin` by a caller who has the numbers on the host, too; `sent`: what `begin` is given.

        Override it if you look at them: where work is queued, reading them back would wait.
        """
        self.begin(sent)

    @property
    def recordable(self) -> bool:
        """Whether what the layers do after the last `begin` may be recorded and repeated: by ops
        alone, which read all that another step of as many tokens has otherwise from tensors that
        stay in place.
        """
        return False
