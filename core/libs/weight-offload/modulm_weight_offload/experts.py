"""Experts of a mixture that stay in host memory and are computed on the CPU beside the device.

The device computes its experts while the host computes the others; both add up. Experts change
their places when tokens have used those of the host more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from modulm.contracts.quantization import LinearKind
from modulm.errors import ConfigError, UnsupportedError
from modulm.ops import twins

if TYPE_CHECKING:
    from modulm.contracts.platform import Platform
    from modulm.nn.weight_slots import Unit
    from modulm_weight_offload.contract import HostCopies
    from modulm_weight_offload.flags import OffloadConfig

__all__ = ["CpuExperts", "Mixture", "mixtures_of", "place_experts"]

#: Whole numbers of the same size, for dtypes that numpy lacks.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Op = Callable[..., Tensor]


class Mixture:
    """A mixture while its weights are loaded. stacks: its two stacked linear layers.

    on_host: experts that stay in host memory, at first the last ones.
    """

    def __init__(self, module: Any, stacks: Sequence[Module], on_host: int) -> None:
        self.module, self.stacks, self._on_host = module, tuple(stacks), on_host
        self.experts = int(module.gate_up.spec.experts)
        #: By stack, the weights of the experts in host memory.
        self.host: dict[int, dict[int, Tensor]] = {}

    @property
    def host_share(self) -> float:
        """The fraction of its experts in host memory."""
        return self._on_host / self.experts

    def split(self, layer: Any, copies: HostCopies) -> None:
        """Leave a loaded stack's first experts on the device. Raises UnsupportedError."""
        stack = layer.method.experts(layer)
        if not isinstance(stack, Tensor) or len(stack) != self.experts:
            raise UnsupportedError(
                f"cpu_offload_experts: {layer.spec.name} is quantized or packed; only experts "
                "whose weights are plain tensors can be divided"
            )
        kept = self.experts - self._on_host
        self.host[id(layer)] = {
            expert: _on_host(stack[expert], copies) for expert in range(kept, self.experts)
        }
        first = stack.detach()[:kept].clone()
        for tensor in {
            id(each): each for each in (stack, layer._parameters.get("weight"))
        }.values():
            if tensor is not None:
                tensor.data = first

    def attach(self, platform: Platform, copies: HostCopies, flags: OffloadConfig) -> CpuExperts:
        """Let the module compute with experts in both places."""
        module = self.module
        experts = CpuExperts(
            module.fused_experts,
            [self.host[id(layer)] for layer in self.stacks],
            self.experts,
            platform,
            copies,
            flags.cpu_offload_experts_interval,
        )
        module.fused_experts = experts.compute
        return experts


def mixtures_of(model: Module, on_host: int) -> list[Mixture]:
    """Return the mixtures of a model that keep `on_host` experts in host memory.

    Raises ConfigError for a model without experts or with too few, UnsupportedError for experts
    with adapters or spread over ranks.
    """
    if not on_host:
        return []
    mixtures = []
    for name, module in model.named_modules():
        stacks: list[Any] = [getattr(module, each, None) for each in ("gate_up", "down")]
        specs = [getattr(each, "spec", None) for each in stacks]
        if not all(spec is not None and spec.kind is LinearKind.EXPERT for spec in specs):
            continue
        spec, op = stacks[0].spec, getattr(module, "fused_experts", None)
        if on_host >= spec.experts:
            raise ConfigError(
                "cpu_offload_experts", f"{name} has {spec.experts} experts; keep one at least"
            )
        if op is None or isinstance(op, partial) or op is not module.ops.fused_experts:
            raise UnsupportedError(
                f"cpu_offload_experts: {name}: not with adapters, and not with experts that are "
                "spread over ranks"
            )
        mixtures.append(Mixture(module, stacks, on_host))
    if not mixtures:
        raise ConfigError("cpu_offload_experts", f"{type(model).__name__} has no experts")
    return mixtures


@contextmanager
def place_experts(
    units: Sequence[Unit], mixtures: Mapping[int, Mixture], copies: HostCopies
) -> Iterator[None]:
    """Divide each stack as soon as it is loaded. mixtures: by the id of their stacks."""
    finishes = [(unit, unit.finish) for unit in units if id(unit.module) in mixtures]

    def divide(unit: Unit, finish: Callable[[], None] | None) -> None:
        if finish is not None:
            finish()
        mixtures[id(unit.module)].split(unit.module, copies)

    for unit, finish in finishes:
        if _has_weights(unit):
            unit.finish = partial(divide, unit, finish)
    try:
        yield
    finally:
        for unit, finish in finishes:
            unit.finish = finish


def _has_weights(unit: Unit) -> bool:
    """Whether a unit is a stack, not its biases alone."""
    return any(slot.attribute != "bias" for slot in unit.slots)


class CpuExperts:
    """The op `fused_experts` of a mixture with experts in both places.

    op: the device's. host: by stack, the weights of experts in host memory. interval: steps after
    which experts may change their places; 0: never.
    """

    def __init__(
        self,
        op: Op,
        host: Sequence[dict[int, Tensor]],
        experts: int,
        platform: Platform,
        copies: HostCopies,
        interval: int,
    ) -> None:
        self._op, self._host, self._platform, self._copies = op, host, platform, copies
        self._interval, self._steps = interval, 0
        self._staging = platform.staging()
        #: The expert in each place of the device's stacks, and the places by expert (-1: host).
        self.residents = np.array([e for e in range(experts) if e not in host[0]])
        self._places = np.full(experts, -1)
        self._places[self.residents] = np.arange(len(self.residents))
        self._sent: tuple[Tensor, ...] | None = None
        #: Tokens that each expert was chosen for; halved with each exchange.
        self.uses = np.zeros(experts, dtype=np.int64)
        #: Number of experts that have moved to the device.
        self.moved = 0

    @property
    def on_host(self) -> frozenset[int]:
        """Experts that the CPU computes."""
        return frozenset(self._host[0])

    @property
    def host_bytes(self) -> int:
        """Weights in host memory."""
        return sum(weight.nbytes for stack in self._host for weight in stack.values())

    def weight(self, index: int, stack: Tensor, expert: int) -> Tensor:
        """Return an expert's weight in the stack at `index`. stack: the device's experts."""
        place = int(self._places[expert])
        return self._host[index][expert] if place < 0 else stack[place]

    def compute(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        **gate: Any,
    ) -> Tensor:
        """x: [tokens, hidden]; see the twin of `fused_experts`."""
        if self._interval and self._steps and self._steps % self._interval == 0:
            self._exchange((gate_up, down))
        self._steps += 1
        if self._sent is None:
            self._sent = self._staging.send((self._places, self.residents))
        places, residents = self._sent
        biases = [each for each in (gate_up_bias, down_bias) if each is not None]
        fetched = self._platform.fetch((_carried(x), weights.float(), ids, *map(_carried, biases)))
        local = places[ids]
        result = self._op(
            x,
            weights.masked_fill(local < 0, 0),
            local.clamp(min=0),
            gate_up,
            down,
            gate_up_bias=None if gate_up_bias is None else gate_up_bias[residents],
            down_bias=None if down_bias is None else down_bias[residents],
            **gate,
        )
        arrays = fetched.wait()
        with self._copies.host():
            host_biases = iter(
                torch.from_numpy(a).view(b.dtype) for a, b in zip(arrays[3:], biases, strict=True)
            )
            names = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
            more = {name: None if b is None else next(host_biases) for name, b in names.items()}
            rest = self._compute(x.dtype, arrays[:3], more, gate)
        if rest is None:
            return result
        return result + self._staging.send((rest,))[0].view(x.dtype)

    def _compute(
        self,
        dtype: torch.dtype,
        arrays: Sequence[np.ndarray],
        biases: Mapping[str, Any],
        gate: Mapping[str, Any],
    ) -> np.ndarray | None:
        """Compute the share of the host's experts: [tokens, hidden]; None if no token uses them."""
        states, weights, ids = arrays
        self.uses += np.bincount(ids.ravel(), minlength=len(self.uses))
        tokens, choices = np.nonzero(self._places[ids] < 0)
        if not len(tokens):
            return None
        x = torch.from_numpy(states).view(dtype)
        rows = torch.from_numpy(tokens)
        gate_up: Any = self._host[0]
        down: Any = self._host[1]
        outputs = twins.fused_experts(
            x[rows],
            torch.from_numpy(weights[tokens, choices, None]),
            torch.from_numpy(ids[tokens, choices, None]),
            gate_up,
            down,
            **biases,
            **gate,
        )
        total = torch.zeros(x.shape, dtype=torch.float32).index_add_(0, rows, outputs.float())
        array: np.ndarray = _carried(total.to(dtype)).numpy()
        return array

    def _exchange(self, stacks: Sequence[Tensor]) -> None:
        """Move experts to the device that were used more than others there."""
        waiting = sorted(self._host[0], key=lambda expert: (-self.uses[expert], expert))
        places = np.argsort(self.uses[self.residents], kind="stable").tolist()
        for expert, place in zip(waiting, places, strict=False):
            leaving = int(self.residents[place])
            if self.uses[expert] <= self.uses[leaving]:
                break
            for stack, host in zip(stacks, self._host, strict=True):
                (array,) = self._platform.fetch((_carried(stack[place]),)).wait()
                with self._copies.host():
                    left = _on_host(torch.from_numpy(array).view(stack.dtype), self._copies)
                self._copies.wait(self._copies.start(stack[place], host.pop(expert)))
                host[leaving] = left
            self.residents[place] = expert
            self._places[expert], self._places[leaving] = place, -1
            self._sent = None
            self.moved += 1
        self.uses //= 2


def _on_host(weight: Tensor, copies: HostCopies) -> Tensor:
    """Copy a weight to host memory from which the device can copy it."""
    memory = copies.allocate(weight.nbytes)
    return memory.view(weight.dtype).view(weight.shape).copy_(weight)


def _carried(tensor: Tensor) -> Tensor:
    """View a tensor as whole numbers, which numpy has."""
    return tensor.view(_CARRIERS[tensor.element_size()])
