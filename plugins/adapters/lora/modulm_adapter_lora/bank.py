"""The adapter bank: adapters in host memory, and those in device slots."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import mutable
from torch import Tensor

from modulm.contracts.adapter import AdaptedExperts, AdaptedLayer, AdapterBank
from modulm.contracts.quantization import LinearKind
from modulm.errors import CheckpointError, EngineError
from modulm_adapter_lora.files import (
    AdapterFiles,
    read_adapter,
    read_settings,
    sort_tensors,
    stamp_of,
)
from modulm_adapter_lora.layers import LoraExperts, LoraLayer, Step
from modulm_adapter_lora.norms import LoraNorm, adapted_norm
from modulm_adapter_lora.options import LoraOptions
from modulm_adapter_lora.prepared import Prepared, Preparer
from modulm_adapters.lora_ops import LoraTable, SlotBlocks

if TYPE_CHECKING:
    from modulm.contracts.adapter import Naming
    from modulm.contracts.kernels import Ops
    from modulm.contracts.platform import Platform
    from modulm.contracts.quantization import LinearSpec

__all__ = ["LoraBank"]


@mutable(eq=False)
class _Added:
    """An added adapter. `held`: its weights, None while not in host memory. stamp: of the files
    that were read. sent: the tensors that have replaced those of the files, if any.
    """

    path: Path
    held: Prepared | None
    stamp: tuple[tuple[str, int, int, int], ...]
    sent: AdapterFiles | None = None


class LoraBank(AdapterBank):
    """LoRA adapters in PEFT's format.

    Files are read and prepared on a separate thread, limited to one core, while steps continue; a
    slot then uses the prepared tensors without a copy.
    """

    name = "lora"
    api = 1
    Config = LoraOptions
    config: LoraOptions

    def __init__(self, config: object, platform: Platform, ops: Ops) -> None:
        super().__init__(config, platform, ops)
        self._step = Step(self.slots)
        #: For kernels of recorded steps, on devices that queue them.
        self._blocks: SlotBlocks | None = None
        if platform.queued and ops.find("add_lora_blocks") is not None:
            self._blocks = SlotBlocks(self.slots, platform.device)
            self._staging = platform.staging()
        self._layers: dict[str, LoraLayer] = {}
        self._stacks: dict[str, LinearSpec] = {}
        self._elsewhere: list[LinearSpec] = []
        self._experts: list[LoraExperts] = []
        self._norms: dict[str, LoraNorm] = {}
        self._preparer: Preparer | None = None
        self._guard = threading.RLock()
        #: Least recently used first.
        self._added: OrderedDict[str, _Added] = OrderedDict()
        self._slots: dict[int, tuple[str, Prepared]] = {}
        self._renewed: dict[int, tuple[str, Prepared]] = {}
        self._reader = ThreadPoolExecutor(
            1, thread_name_prefix="modulm-adapters", initializer=partial(torch.set_num_threads, 1)
        )

    @property
    def slots(self) -> int:
        return self.config.max_loras

    @property
    def resident(self) -> tuple[str, ...]:
        """Adapters in host memory, least recently used first."""
        with self._guard:
            return tuple(name for name, added in self._added.items() if added.held is not None)

    @property
    def specs(self) -> Mapping[str, LinearSpec]:
        """The layers that adapters may change, by name."""
        return {**{name: layer.spec for name, layer in self._layers.items()}, **self._stacks}

    # Layers.

    def layer(self, spec: LinearSpec) -> AdaptedLayer | None:
        if spec.kind is LinearKind.EXPERT:
            return None
        table = spec.kind is LinearKind.EMBEDDING
        dtype = self._dtype(spec)
        inputs = spec.outputs if table else spec.inputs
        most, device = 1 if table else len(spec.parts), self.platform.device
        widest = max([spec.inputs] if table else spec.parts)
        rank = self.config.max_lora_rank
        pieces = LoraTable(self.slots, most, inputs, dtype, device, rank, widest)
        self._layers[spec.name] = LoraLayer(spec, self._step, self.ops, pieces)
        return self._layers[spec.name]

    def _dtype(self, spec: LinearSpec) -> torch.dtype:
        setting = self.config.lora_dtype
        dtype: torch.dtype = getattr(torch, spec.dtype if setting == "auto" else setting)
        return dtype

    def experts(self, gate_up: LinearSpec, down: LinearSpec) -> AdaptedExperts | None:
        self._stacks |= {spec.name: spec for spec in (gate_up, down)}
        self._experts.append(LoraExperts(gate_up, down, self._step))
        return self._experts[-1]

    def norm(self, name: str, norm: Any) -> Any:
        made = adapted_norm(name, norm, self._step)
        if made is None:
            return norm
        self._norms[name] = made
        return made

    def elsewhere(self, spec: LinearSpec) -> None:
        self._elsewhere.append(spec)

    def memory(self) -> int:
        rank, count = self.config.max_lora_rank, max(self.config.host_adapters, self.slots)
        return sum(
            count * rank * (spec.inputs + spec.outputs) * max(spec.experts, 1)
            * self._dtype(spec).itemsize
            for spec in self.specs.values()
        )  # fmt: skip

    def open(self, names: Naming) -> None:
        self._preparer = Preparer(
            self.config,
            self.specs,
            names,
            lengths=lambda layer: self._layers[layer].squares(),
            product=lambda layer, x: self._layers[layer].product(x),
            refused=self._refused,
            elsewhere=self._elsewhere,
            norms={name: norm.size for name, norm in self._norms.items()},
        )

    def _refused(self, layer: str) -> str:
        found = self._norms.get(layer) or self._layers.get(layer)
        return "" if found is None else found.refused

    # Adapters.

    def add(self, name: str, path: Path) -> None:
        stamp = stamp_of(path)
        prepared = self._read(path)
        with self._guard:
            self._added[name] = _Added(path, prepared, stamp)
            self._added.move_to_end(name)
            self._renew_slots(name, prepared)
            self._make_room(name)

    def replace(self, name: str, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        with self._guard:
            paths = {n: a.path for n, a in self._added.items() if n.rpartition("@")[0] == name}
        if not paths:
            raise CheckpointError(f"there is no adapter {name!r}")
        if self._preparer is None:
            raise EngineError("adapters cannot be replaced before the model is loaded")
        ready: dict[str, tuple[AdapterFiles, Prepared]] = {}
        for key, path in paths.items():
            settings = read_settings(path if path.is_dir() else path.parent)
            files = sort_tensors(Path(f"{name}, the update"), settings, tensors)
            ready[key] = files, self._preparer(files)
        return partial(self._replace, ready)

    def _replace(self, ready: Mapping[str, tuple[AdapterFiles, Prepared]]) -> None:
        """Put replaced tensors in place, in slots from the next step on."""
        with self._guard:
            for key, (files, prepared) in ready.items():
                added = self._added.get(key)
                if added is not None:
                    added.held, added.sent = prepared, files
                    self._renew_slots(key, prepared)

    def _renew_slots(self, name: str, prepared: Prepared) -> None:
        self._renewed |= {
            slot: (name, prepared)
            for slot, (held, _) in {**self._slots, **self._renewed}.items()
            if held == name
        }

    def renew(self) -> None:
        with self._guard:
            held = [(name, added, added.held) for name, added in self._added.items()]
            special = [(n, added) for n, added, one in held if one is not None and one.special]
        for name, added in special:
            if added.sent is None:
                self.add(name, added.path)
            elif self._preparer is not None:
                self._replace({name: (added.sent, self._preparer(added.sent))})

    def prepare(self, name: str) -> None:
        with self._guard:
            added = self._find(name)
            if added.held is not None:
                self._added.move_to_end(name)
                return
        if stamp_of(added.path) != added.stamp:
            raise CheckpointError(
                f"{added.path}: its files have changed since they were read; add it again"
            )
        prepared = self._read(added.path)
        with self._guard:
            if self._added.get(name) is added:
                added.held = prepared
                self._added.move_to_end(name)
                self._make_room(name)

    def remove(self, name: str) -> None:
        with self._guard:
            self._find(name)
            del self._added[name]

    def _find(self, name: str) -> _Added:
        if name not in self._added:
            raise EngineError(f"there is no adapter {name!r}")
        return self._added[name]

    def _read(self, path: Path) -> Prepared:
        return self._reader.submit(self._prepared, path).result()

    def _prepared(self, path: Path) -> Prepared:
        if self._preparer is None:
            raise EngineError("adapters cannot be added before the model is loaded")
        prepared = self._preparer(read_adapter(path))
        if prepared.special and "jax" in self.platform.capabilities:
            raise CheckpointError(
                f"{path}: not supported on {self.platform.name} yet: DoRA, biases, whole weights "
                "and changes of experts; merge the adapter into the model"
            )
        return prepared

    def _make_room(self, kept: str) -> None:
        """Evict the least recently used adapters beyond the limit of host memory, except those
        whose tensors are not those of their files; slots keep theirs.
        """
        in_slots = {name for name, _ in self._slots.values()}
        held = [name for name, added in self._added.items() if added.held is not None]
        for name in held:
            if len(held) <= self.config.host_adapters:
                return
            if name != kept and name not in in_slots and self._added[name].sent is None:
                self._added[name].held = None
                held = [other for other in held if other != name]

    def fill(self, slot: int, name: str) -> None:
        with self._guard:
            added = self._find(name)
        if added.held is None:
            self.prepare(name)
        with self._guard:
            if added.held is None:
                raise EngineError(f"adapter {name!r} was removed while it was read")
            self._added.move_to_end(name)
            self._renewed.pop(slot, None)
            self._put(slot, name, added.held)
            self._make_room(name)

    def _put(self, slot: int, name: str, prepared: Prepared) -> None:
        before = self._slots.pop(slot, None)
        touched = set(prepared.layers) | (set(before[1].layers) if before else set())
        for layer in touched & set(self._layers):
            self._layers[layer].put(slot, prepared.layers.get(layer), self.platform.device)
        for name in touched & set(self._norms):
            self._norms[name].put(slot, prepared.layers.get(name), self.platform.device)
        for experts in self._experts:
            experts.put(slot, prepared.layers)
        self._slots[slot] = name, prepared

    # Steps.

    def begin(self, slots: Tensor | None) -> None:
        self.begin_known(None if slots is None else slots.cpu().numpy(), slots)

    def begin_known(self, slots: np.ndarray | None, sent: Tensor | None) -> None:
        if self._renewed:
            with self._guard:
                for slot, (name, prepared) in self._renewed.items():
                    self._put(slot, name, prepared)
                self._renewed.clear()
        step = self._step
        if slots is None:
            step.groups = None
            return
        step.groups, step.tokens = step.held, len(slots)
        step.held.set(slots)
        step.special = self._special([slot for slot, *_ in step.held.used])
        step.blocks = None
        if self._blocks is not None and len(slots) <= self._blocks.most:
            step.blocks = self._blocks
            step.blocks.set(step.held, self._staging.send)

    def _special(self, slots: Collection[int]) -> bool:
        """Whether an adapter in these slots needs more than the op."""
        held = {**self._slots, **self._renewed}
        return any(slot in held and held[slot][1].special for slot in slots)

    def can_record(self, slots: Collection[int], tokens: int) -> bool:
        if self.platform.queued and (self._blocks is None or tokens > self._blocks.most):
            return False
        return not self._special(slots)
