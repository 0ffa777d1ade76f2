"""An adapter in the form that the layers of one model take, checked against them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen, mutable
from torch import Tensor

from modulm.contracts.quantization import LinearKind
from modulm.errors import CheckpointError
from modulm_adapter_lora.files import AdapterFiles, Change
from modulm_adapter_lora.places import Place, Places, layout_of, rows_of
from modulm_adapters.lora_ops import LoraPiece

if TYPE_CHECKING:
    from modulm.contracts.adapter import Naming
    from modulm.contracts.quantization import LinearSpec
    from modulm_adapter_lora.options import LoraOptions

__all__ = ["LayerChange", "Prepared", "Preparer"]

log = logging.getLogger("modulm.adapters")

#: What running models call the layer that gives logits, whatever their checkpoints call it.
_HEAD = "lm_head"


@mutable(eq=False)
class LayerChange:
    """What an adapter changes of one layer: `pieces` of low rank, and seldom more.

    A layer y = base + b becomes base * scale + bias + added; fp32 [outputs] each, bias being b
    where `rebiased` is not. weights: (first output, weight [outputs, inputs]) in place of the
    base's; of a table of vectors the whole. experts: pieces and magnitudes by expert.
    """

    pieces: list[LoraPiece] = field(factory=list)
    scale: Tensor | None = None
    bias: Tensor | None = None
    rebiased: Tensor | None = None
    added: Tensor | None = None
    weights: list[tuple[int, Tensor]] = field(factory=list)
    experts: dict[int, list[LoraPiece]] = field(factory=dict)
    magnitudes: dict[int, list[tuple[int, Tensor]]] = field(factory=dict)

    @property
    def special(self) -> bool:
        """Whether there is more than pieces."""
        found = (self.scale, self.bias, self.added)
        return bool(self.weights or self.experts or any(x is not None for x in found))


@frozen(eq=False)
class Prepared:
    """An adapter by layers."""

    layers: Mapping[str, LayerChange]

    @property
    def special(self) -> bool:
        """Whether some layer needs more than the op."""
        return any(change.special for change in self.layers.values())


#: Layer -> squared lengths of the rows of its weight, and, with rows of inputs [n, inputs], the
#: weight times those: [n, outputs].
Lengths = Callable[[str], Tensor]
Product = Callable[[str, Tensor], Tensor]


class Preparer:
    """Turns files into what layers take, by the names and layouts of one model."""

    def __init__(
        self,
        options: LoraOptions,
        specs: Mapping[str, LinearSpec],
        names: Naming,
        *,
        lengths: Lengths,
        product: Product,
        refused: Callable[[str], str],
        elsewhere: Sequence[LinearSpec] = (),
    ) -> None:
        self._options, self._specs, self._names = options, specs, names
        self._lengths, self._product, self._refused = lengths, product, refused
        self._places = Places(specs.values())
        self._elsewhere = Places([spec for spec in elsewhere if spec.name not in specs])

    def __call__(self, files: AdapterFiles) -> Prepared:
        """Raises CheckpointError naming the file, the tensor and what was expected."""
        one = _One(self, files)
        for (_, wrappers), change in files.changes.items():
            if self._wanted(change.module, files.file) and not self._is_elsewhere(one, change):
                one.take(change, wrappers)
        one.tie()
        return Prepared(one.layers)

    def _is_elsewhere(self, one: _One, change: Change) -> bool:
        """Whether another pipeline stage has the layer."""
        name = one._named(change.module)
        head = self._elsewhere.head if name == _HEAD else None
        return (self._elsewhere.get(name) or head) is not None

    def _wanted(self, module: str, file: Path) -> bool:
        only = self._options.lora_target_modules
        if only is None or any(f".{module}".endswith(f".{end}") for end in only):
            return True
        log.warning("%s: %s is left out, as lora_target_modules says", file, module)
        return False

    def dtype(self, layer: str) -> torch.dtype:
        """Of an adapter's weights for a layer."""
        given = self._options.lora_dtype
        found: torch.dtype = getattr(torch, self._specs[layer].dtype if given == "auto" else given)
        return found

    def place(self, name: str, what: str, file: Path) -> Place:
        """Raises CheckpointError if the model has no such layer, or it cannot be changed."""
        found = self._places.get(name)
        if found is None and name == _HEAD:
            found = self._places.head
        if found is None:
            raise CheckpointError(
                f"{file}: {what}: the model has no layer {name} that an adapter can change"
            )
        if reason := self._refused(found.layer):
            raise CheckpointError(f"{file}: {what}: {reason}: not yet")
        return found


class _One:
    """One adapter while it is prepared."""

    def __init__(self, by: Preparer, files: AdapterFiles) -> None:
        self.by, self.file, self.settings = by, files.file, files.settings
        self.layers: dict[str, LayerChange] = {}
        self._table: tuple[str, Tensor, Tensor] | None = None
        self._replaced: tuple[str, Tensor] | None = None

    def _fail(self, name: str, words: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {name}: {words}")

    def _layer(self, place: Place) -> LayerChange:
        return self.layers.setdefault(place.layer, LayerChange())

    def take(self, change: Change, wrappers: int) -> None:
        """All of one module's."""
        if change.down is not None and change.up is not None:
            self._check_rank(change, change.down, change.up)
            if change.table:
                self._take_table(change, change.down, change.up)
            else:
                self._take_pair(change, change.down, change.up, wrappers)
        if change.weight is not None:
            self._take_weight(change, change.weight)
        if change.bias is not None:
            self._take_bias(change, change.bias)

    def _check_rank(self, change: Change, down: Tensor, up: Tensor) -> None:
        if down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1] or not len(down):
            shapes = f"{list(down.shape)} and {list(up.shape)}"
            raise self._fail(change.name, f"lora_A and lora_B are {shapes}, [r, n] and [m, r] were"
                             " expected")  # fmt: skip

    def _rank(self, change: Change, found: int, stored: str = "", experts: int = 1) -> None:
        """Check the rank that the tensors have; stored: the parameter, where that is no module."""
        rank = self.settings.rank_of(stored or change.module)
        if found != rank * experts:
            times = f" for each of {experts} experts" if experts > 1 else ""
            raise self._fail(
                change.name, f"the rank is {found}, adapter_config.json says {rank}{times}"
            )
        most = self.by._options.max_lora_rank
        if rank > most:
            raise self._fail(change.name, f"the rank {rank} is more than max_lora_rank {most}")

    # Tables of vectors.

    def _named(self, module: str, suffix: str = ".weight") -> str:
        """The model's name of a module that is not laid out otherwise than the file has it."""
        stored = module + suffix
        try:
            names = [name for name, _ in self.by._names(stored, torch.empty(1, 1, device="meta"))]
        except (RuntimeError, ValueError, IndexError):
            return module
        return names[0].removesuffix(suffix) if len(names) == 1 else module

    def _take_table(self, change: Change, down: Tensor, up: Tensor) -> None:
        """down: [rank, entries]; up: [hidden, rank]."""
        self._rank(change, len(down))
        name = self._named(change.module)
        place = self.by.place(name, change.name, self.file)
        spec = self.by._specs[place.layer]
        if spec.kind is not LinearKind.EMBEDDING:
            raise self._fail(change.name, f"{name} is no table of vectors")
        self._fits(change.name, (up.shape[0], down.shape[1]), (spec.inputs, place.outputs))
        scaled = up.float() * self.settings.scaling(change.module)
        found = self._layer(place)
        if change.magnitude is not None:
            table_up = self._dora_table(place.layer, change, down, scaled)
            found.scale = change.magnitude.float() / table_up
            scaled = scaled * found.scale[:, None]
        dtype = self.by.dtype(place.layer)
        piece = LoraPiece(down.T.to(dtype).contiguous(), scaled.T.to(dtype).contiguous())
        found.pieces.append(piece)
        self._table = (place.layer, down, scaled)

    def _dora_table(self, layer: str, change: Change, down: Tensor, up: Tensor) -> Tensor:
        """[hidden]: lengths of the columns of a table of vectors with its change."""
        ids = torch.arange(down.shape[1])
        total = torch.zeros(up.shape[0])
        for some in ids.split(4096):
            rows = self.by._product(layer, some).float() + down[:, some].float().T @ up.T
            total += rows.square().sum(0)
        return total.sqrt()

    def tie(self) -> None:
        """Where a head is tied to a table and the adapter says it stays so, it changes with it."""
        if not self.settings.tied:
            return
        heads = [n for n, spec in self.by._specs.items() if spec.kind is LinearKind.LM_HEAD]
        if len(heads) != 1 or heads[0] in self.layers:
            return
        place = self.by.place(heads[0], heads[0], self.file)
        if self._table is not None:
            _, down, up = self._table
            found, dtype = self._layer(place), self.by.dtype(place.layer)
            for cut in place.cuts:
                rows = down[:, cut.source : cut.source + cut.size]
                found.pieces.append(
                    LoraPiece(up.T.to(dtype).contiguous(), rows.to(dtype).contiguous(), cut.start)
                )
        elif self._replaced is not None:
            found = self._layer(place)
            for cut in place.cuts:
                found.weights.append((cut.start, self._replaced[1][cut.source :][: cut.size]))

    # Linear maps.

    def _take_pair(self, change: Change, down: Tensor, up: Tensor, wrappers: int) -> None:
        """down: [rank, inputs]; up: [outputs, rank]; of a stack, experts * rank."""
        stored = change.module + ".weight"
        stack = self._stack(change, down, up)
        if stack is not None:
            self._take_stack(change, down, up, stack)
            return
        self._rank(change, len(down))
        scaled = up.float() * self.settings.scaling(change.module)
        columns = [scaled]
        if change.added is not None:
            columns.append(change.added.float()[:, None] * self.settings.scaling(change.module))
        if change.magnitude is not None:
            columns.append(change.magnitude.float()[:, None])
        try:
            rows = self._rows(stored, torch.cat(columns, 1))
        except RuntimeError as error:
            raise self._fail(change.name, f"lora_B, its bias or magnitude: {error}") from error
        for name, piece in rows.items():
            self._put(change, name, down, piece)

    def _rows(self, stored: str, rows: Tensor) -> dict[str, Tensor]:
        """Rows [..., outputs, n] of a stored weight by the model's names and in its layout."""
        names = self.by._names
        found, turned = layout_of(names, stored, outputs=rows.shape[:-1])
        known = [n for n, _ in found if self.by._places.get(n.removesuffix(".weight"))]
        if not known:  # by the name that the running model has, which may be the file's as well
            return {stored.removesuffix(".weight"): rows}
        pieces = rows_of(names, stored, rows, turned)
        return {name.removesuffix(".weight"): piece for name, piece in pieces.items()}

    def _put(self, change: Change, name: str, down: Tensor, rows: Tensor) -> None:
        """rows: [outputs, rank + what else there is], as the model has them."""
        rank = len(down)
        place = self.by.place(name, change.name, self.file)
        self._fits(change.name, (rows.shape[0], down.shape[1]), (place.outputs, place.inputs))
        dtype = self.by.dtype(place.layer)
        found = self._layer(place)
        narrow = down[:, place.columns].to(dtype).contiguous()
        for cut in place.cuts:
            part = rows[cut.source : cut.source + cut.size]
            up, more = part[:, :rank], list(part[:, rank:].unbind(1))
            magnitude = more.pop() if change.magnitude is not None else None
            added = more.pop() if more else None
            if place.expert is not None:
                if added is not None:
                    raise self._fail(change.name, "lora_bias of an expert: not yet")
                pieces = found.experts.setdefault(place.expert, [])
                pieces.append(LoraPiece(narrow.float(), up.T.float().contiguous(), cut.start))
                if magnitude is not None:
                    lengths = found.magnitudes.setdefault(place.expert, [])
                    lengths.append((cut.start, magnitude))
                continue
            at = slice(cut.start, cut.start + cut.size)
            if magnitude is not None:
                scale = magnitude / self._length(place, change, down, up, at)
                self._vector(found, "scale", 1.0, place)[at] = scale
                up = up * scale[:, None]
                added = None if added is None else added * scale
            if added is not None:
                self._vector(found, "added", 0.0, place)[at] = added
            found.pieces.append(LoraPiece(narrow, up.T.to(dtype).contiguous(), cut.start))

    def _length(self, place: Place, change: Change, down: Tensor, up: Tensor, at: slice) -> Tensor:
        """[outputs]: lengths of the rows of a weight with its change (Liu et al., arXiv
        2402.09353), of which only the squares and the product with `down` are looked at.
        """
        spec = self.by._specs[place.layer]
        if spec.input_shard.whole != spec.inputs:
            raise self._fail(change.name, "DoRA of a layer that ranks share: not yet")
        wide = down.float()
        mixed = self.by._product(place.layer, wide)[:, at].float().T
        squares = self.by._lengths(place.layer)[at] + 2 * (up * mixed).sum(1)
        return (squares + ((up @ (wide @ wide.T)) * up).sum(1)).clamp_min(0).sqrt()

    def _vector(self, found: LayerChange, what: str, value: float, place: Place) -> Tensor:
        """One of the vectors of a layer's change, made where there is none."""
        held: Tensor | None = getattr(found, what)
        if held is None:
            held = torch.full((self.by._specs[place.layer].outputs,), value)
            setattr(found, what, held)
        return held

    # Stacks of experts.

    def _stack(self, change: Change, down: Tensor, up: Tensor) -> tuple[str, Place, bool] | None:
        """The stack that a change of a module's parameter is for, by the shapes: (stored name,
        place, whether `down` takes outputs, as PEFT had it before its version 0.19).
        """
        module = self._named(change.module, "")
        candidates = [(n, n) for n in self.by._places.below(module)]
        own = self.by._places.get(module)
        if own is not None and own.experts:
            candidates.append((module, change.module))
        shape = (down.shape[1], up.shape[0])
        places = [(stored, self.by._places.get(name)) for name, stored in candidates]
        for turned in (False, True):
            for stored, place in places:
                if place is None:
                    continue
                fits = (place.inputs, place.outputs)
                if shape == (fits[::-1] if turned else fits):
                    return stored, place, turned
        if candidates and places:
            wanted = ", ".join(f"[{p.outputs}, {p.inputs}]" for _, p in places if p is not None)
            raise self._fail(change.name, f"changes [{shape[1]}, {shape[0]}], experts are {wanted}")
        return None

    def _take_stack(
        self, change: Change, down: Tensor, up: Tensor, stack: tuple[str, Place, bool]
    ) -> None:
        """A change of a stack; PEFT has `down` expert by expert and `up` rank by rank."""
        stored, place, turned = stack
        experts = place.experts
        self._rank(change, len(down), stored, experts)
        if change.added is not None or change.magnitude is not None:
            raise self._fail(change.name, "a bias or magnitude of a stack of experts: not yet")
        narrow = down.float().unflatten(0, (experts, -1))
        wide = up.float().unflatten(1, (-1, experts)).permute(2, 0, 1)
        wide = wide * self.settings.scaling(stored)
        if turned:
            narrow, wide = wide.transpose(1, 2), narrow.transpose(1, 2)
        for name, rows in self._rows(stored, wide).items():
            at = self.by.place(name, change.name, self.file)
            self._fits(change.name, (rows.shape[1], narrow.shape[2]), (at.outputs, at.inputs))
            found = self._layer(at)
            for expert in range(experts):
                pieces = found.experts.setdefault(expert, [])
                pieces += [
                    LoraPiece(narrow[expert].contiguous(), part.T.contiguous(), cut.start)
                    for cut in at.cuts
                    for part in [rows[expert, cut.source : cut.source + cut.size]]
                ]

    # What stands in place of the base model's.

    def _take_weight(self, change: Change, weight: Tensor) -> None:
        for name, piece in self._replacing(change, ".weight", weight):
            place = self.by.place(name, change.name, self.file)
            self._fits(change.name, tuple(piece.shape), self._shape(place))
            if place.experts or place.expert is not None:
                raise self._fail(change.name, "experts in modules_to_save: not yet")
            found, spec = self._layer(place), self.by._specs[place.layer]
            held = piece.to(getattr(torch, spec.dtype)).contiguous()
            if spec.kind is LinearKind.EMBEDDING:
                self._replaced = (place.layer, held)
                found.weights.append((0, held))
                continue
            for cut in place.cuts:
                rows = held[cut.source : cut.source + cut.size, place.columns]
                found.weights.append((cut.start, rows))

    def _shape(self, place: Place) -> tuple[int, int]:
        return place.outputs, place.inputs

    def _take_bias(self, change: Change, bias: Tensor) -> None:
        for name, piece in self._replacing(change, ".bias", bias):
            place = self.by.place(name, change.name, self.file)
            self._fits(change.name, tuple(piece.shape), (place.outputs,))
            if not self.by._specs[place.layer].bias and change.weight is None:
                raise self._fail(change.name, "the layer has no bias")
            found = self._layer(place)
            held = self._vector(found, "bias", 0.0, place)
            if found.rebiased is None:
                found.rebiased = torch.zeros(len(held), dtype=torch.bool)
            for cut in place.cuts:
                at = slice(cut.start, cut.start + cut.size)
                held[at] = piece[cut.source : cut.source + cut.size].float()
                found.rebiased[at] = True

    def _replacing(self, change: Change, suffix: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """A stored tensor by the model's names, as a checkpoint's is."""
        stored = change.module + suffix
        try:
            found = list(self.by._names(stored, tensor))
        except (RuntimeError, ValueError, IndexError) as error:
            words = f"{list(tensor.shape)} does not fit the model: {error}"
            raise self._fail(stored, words) from error
        pieces = [(name.removesuffix(suffix), piece) for name, piece in found]
        if not any(self.by._places.get(name) for name, _ in pieces):
            return [(change.module, tensor)]
        return pieces

    def _fits(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        """Raises CheckpointError if a change is of another size than what it changes."""
        if found != wanted:
            if found[1:] == wanted[1:]:
                name = name.replace("lora_A", "lora_B")
            raise self._fail(name, f"is for {list(found)}, the model's layer is {list(wanted)}")
