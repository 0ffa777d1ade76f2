"""Converts an adapter to the layout of a model's layers, and validates it against them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen, mutable
from torch import Tensor

from modulm.contracts.quantization import LinearKind
from modulm.errors import CheckpointError
from modulm_adapter_lora.files import AdapterFiles, Change
from modulm_adapter_lora.targets import Target, Targets, layout_of, rows_of
from modulm_adapters.lora_ops import LoraPiece

if TYPE_CHECKING:
    from modulm.contracts.adapter import Naming
    from modulm.contracts.quantization import LinearSpec
    from modulm_adapter_lora.options import LoraOptions

__all__ = ["LayerChange", "Prepared", "Preparer"]

log = logging.getLogger("modulm.adapters")

#: What to do with a norm that cannot be a request's own.
_MERGE = "merge the adapter into the model (PEFT's merge_and_unload) and serve that"
#: Name of the LM head in running models, whatever the checkpoint calls it.
_HEAD = "lm_head"


@mutable(eq=False)
class LayerChange:
    """An adapter's change of one layer: low-rank `pieces`, and rarely more.

    A layer y = base + b becomes base * scale + bias + added, all fp32 [outputs]; bias is b unless
    `rebiased`. weights: (first output, weight [outputs, inputs]) that replace the base's; for an
    embedding the whole table. experts: pieces and magnitudes by expert. norm, norm_bias: of a norm,
    [size], in place of the base's.
    """

    pieces: list[LoraPiece] = field(factory=list)
    scale: Tensor | None = None
    bias: Tensor | None = None
    rebiased: Tensor | None = None
    added: Tensor | None = None
    weights: list[tuple[int, Tensor]] = field(factory=list)
    experts: dict[int, list[LoraPiece]] = field(factory=dict)
    magnitudes: dict[int, list[tuple[int, Tensor]]] = field(factory=dict)
    norm: Tensor | None = None
    norm_bias: Tensor | None = None

    @property
    def special(self) -> bool:
        """Whether there is more than low-rank pieces."""
        extras = (self.scale, self.bias, self.added, self.norm, self.norm_bias)
        return bool(self.weights or self.experts or any(x is not None for x in extras))


@frozen(eq=False)
class Prepared:
    """An adapter's changes by layer."""

    layers: Mapping[str, LayerChange]

    @property
    def special(self) -> bool:
        """Whether any layer needs more than the op."""
        return any(change.special for change in self.layers.values())


#: Layer -> squared norms of its weight's rows, and the weight times inputs: [n, inputs] -> [n,
#: outputs].
Lengths = Callable[[str], Tensor]
Product = Callable[[str, Tensor], Tensor]


class Preparer:
    """Prepares adapters, by the names and layouts of one model."""

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
        norms: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """norms: name of each norm -> its size."""
        self._options, self._specs, self._names = options, specs, names
        self._lengths, self._product, self._refused = lengths, product, refused
        self._norms = norms
        self._targets = Targets(specs.values())
        self._elsewhere = Targets([spec for spec in elsewhere if spec.name not in specs])

    def __call__(self, files: AdapterFiles) -> Prepared:
        """Convert an adapter. Raises CheckpointError naming the file, the tensor and the
        expectation.
        """
        one = _One(self, files)
        for (_, wrappers), change in files.changes.items():
            if self._is_target(change.module, files.file) and not self._is_elsewhere(one, change):
                one.take(change, wrappers)
        one.tie()
        return Prepared(one.layers)

    def _is_elsewhere(self, one: _One, change: Change) -> bool:
        """Whether the layer is on another pipeline stage."""
        name = one._named(change.module)
        head = self._elsewhere.head if name == _HEAD else None
        return (self._elsewhere.get(name) or head) is not None

    def _is_target(self, module: str, file: Path) -> bool:
        only = self._options.lora_target_modules
        if only is None or any(f".{module}".endswith(f".{end}") for end in only):
            return True
        log.warning("%s: %s is skipped because of lora_target_modules", file, module)
        return False

    def dtype(self, layer: str) -> torch.dtype:
        """The dtype of adapter weights for a layer."""
        setting = self._options.lora_dtype
        dtype: torch.dtype = getattr(
            torch, self._specs[layer].dtype if setting == "auto" else setting
        )
        return dtype

    def target(self, name: str, what: str, file: Path) -> Target:
        """Find a layer. Raises CheckpointError if the model lacks it, or it cannot be changed."""
        target = self._targets.get(name)
        if target is None and name == _HEAD:
            target = self._targets.head
        if target is None:
            raise CheckpointError(
                f"{file}: {what}: the model has no layer {name} that an adapter can change"
            )
        if reason := self._refused(target.layer):
            raise CheckpointError(f"{file}: {what}: {reason}: not supported yet")
        return target


class _One:
    """One adapter in preparation."""

    def __init__(self, by: Preparer, files: AdapterFiles) -> None:
        self.by, self.file, self.settings = by, files.file, files.settings
        self.layers: dict[str, LayerChange] = {}
        self._table: tuple[str, Tensor, Tensor] | None = None
        self._replaced: tuple[str, Tensor] | None = None

    def _fail(self, name: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {name}: {message}")

    def _layer(self, target: Target) -> LayerChange:
        return self.layers.setdefault(target.layer, LayerChange())

    def take(self, change: Change, wrappers: int) -> None:
        """Convert the change of one module."""
        if change.down is not None and change.up is not None:
            self._check_rank(change, change.down, change.up)
            if change.table:
                self._take_table(change, change.down, change.up)
            else:
                self._take_pair(change, change.down, change.up, wrappers)
        if change.weight is not None and not self._take_norm(change, "weight", change.weight):
            self._take_weight(change, change.weight)
        if change.bias is not None and not self._take_norm(change, "bias", change.bias):
            self._take_bias(change, change.bias)

    def _check_rank(self, change: Change, down: Tensor, up: Tensor) -> None:
        if down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1] or not len(down):
            shapes = f"{list(down.shape)} and {list(up.shape)}"
            raise self._fail(change.name, "lora_A and lora_B must be [r, n] and [m, r], not "
                f"{shapes}")  # fmt: skip

    def _rank(self, change: Change, stored_rank: int, stored: str = "", experts: int = 1) -> None:
        """Check the rank of the tensors. stored: the parameter's name, if it is not a module."""
        rank = self.settings.rank_of(stored or change.module)
        if stored_rank != rank * experts:
            times = f" for each of {experts} experts" if experts > 1 else ""
            raise self._fail(
                change.name, f"the rank is {stored_rank}, adapter_config.json says {rank}{times}"
            )
        most = self.by._options.max_lora_rank
        if rank > most:
            raise self._fail(change.name, f"the rank {rank} is more than max_lora_rank {most}")

    # Embeddings.

    def _named(self, module: str, suffix: str = ".weight") -> str:
        """The model's name of a module that has the same layout as in the file."""
        stored = module + suffix
        try:
            names = [name for name, _ in self.by._names(stored, torch.empty(1, 1, device="meta"))]
        except (RuntimeError, ValueError, IndexError):
            return module
        return names[0].removesuffix(suffix) if len(names) == 1 else module

    def _take_table(self, change: Change, down: Tensor, up: Tensor) -> None:
        """Convert the change of an embedding. down: [rank, entries]; up: [hidden, rank]."""
        self._rank(change, len(down))
        name = self._named(change.module)
        target = self.by.target(name, change.name, self.file)
        spec = self.by._specs[target.layer]
        if spec.kind is not LinearKind.EMBEDDING:
            raise self._fail(change.name, f"{name} is not a table of vectors")
        self._fits(change.name, (up.shape[0], down.shape[1]), (spec.inputs, target.outputs))
        scaled = up.float() * self.settings.scaling(change.module)
        layer = self._layer(target)
        if change.magnitude is not None:
            table_up = self._dora_table(target.layer, change, down, scaled)
            layer.scale = change.magnitude.float() / table_up
            scaled = scaled * layer.scale[:, None]
        dtype = self.by.dtype(target.layer)
        piece = LoraPiece(down.T.to(dtype).contiguous(), scaled.T.to(dtype).contiguous())
        layer.pieces.append(piece)
        self._table = (target.layer, down, scaled)

    def _dora_table(self, layer: str, change: Change, down: Tensor, up: Tensor) -> Tensor:
        """Compute the column norms of an embedding with its change: [hidden]."""
        ids = torch.arange(down.shape[1])
        total = torch.zeros(up.shape[0])
        for some in ids.split(4096):
            rows = self.by._product(layer, some).float() + down[:, some].float().T @ up.T
            total += rows.square().sum(0)
        return total.sqrt()

    def tie(self) -> None:
        """Copy the embedding's change to a tied LM head, if the adapter keeps them tied."""
        if not self.settings.tied:
            return
        heads = [n for n, spec in self.by._specs.items() if spec.kind is LinearKind.LM_HEAD]
        if len(heads) != 1 or heads[0] in self.layers:
            return
        target = self.by.target(heads[0], heads[0], self.file)
        if self._table is not None:
            _, down, up = self._table
            layer, dtype = self._layer(target), self.by.dtype(target.layer)
            for span in target.slices:
                rows = down[:, span.source : span.source + span.size]
                layer.pieces.append(
                    LoraPiece(up.T.to(dtype).contiguous(), rows.to(dtype).contiguous(), span.start)
                )
        elif self._replaced is not None:
            layer = self._layer(target)
            for span in target.slices:
                layer.weights.append((span.start, self._replaced[1][span.source :][: span.size]))

    # Linear layers.

    def _take_pair(self, change: Change, down: Tensor, up: Tensor, wrappers: int) -> None:
        """Convert a low-rank change. down: [rank, inputs]; up: [outputs, rank]; of a stack: experts
        * rank.
        """
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
        """Convert rows [..., outputs, n] of a stored weight to the model's names and layout."""
        names = self.by._names
        layout, turned = layout_of(names, stored, outputs=rows.shape[:-1])
        renamed = [n for n, _ in layout if self.by._targets.get(n.removesuffix(".weight"))]
        if not renamed:  # named as in the running model, possibly also in the file
            return {stored.removesuffix(".weight"): rows}
        pieces = rows_of(names, stored, rows, turned)
        return {name.removesuffix(".weight"): piece for name, piece in pieces.items()}

    def _put(self, change: Change, name: str, down: Tensor, rows: Tensor) -> None:
        """Store a change. rows: [outputs, rank + further columns], in the model's layout."""
        rank = len(down)
        target = self.by.target(name, change.name, self.file)
        self._fits(change.name, (rows.shape[0], down.shape[1]), (target.outputs, target.inputs))
        dtype = self.by.dtype(target.layer)
        layer = self._layer(target)
        narrow = down[:, target.columns].to(dtype).contiguous()
        for span in target.slices:
            part = rows[span.source : span.source + span.size]
            up, more = part[:, :rank], list(part[:, rank:].unbind(1))
            magnitude = more.pop() if change.magnitude is not None else None
            added = more.pop() if more else None
            if target.expert is not None:
                if added is not None:
                    raise self._fail(change.name, "lora_bias of an expert: not supported yet")
                pieces = layer.experts.setdefault(target.expert, [])
                pieces.append(LoraPiece(narrow.float(), up.T.float().contiguous(), span.start))
                if magnitude is not None:
                    lengths = layer.magnitudes.setdefault(target.expert, [])
                    lengths.append((span.start, magnitude))
                continue
            at = slice(span.start, span.start + span.size)
            if magnitude is not None:
                scale = magnitude / self._length(target, change, down, up, at)
                self._vector(layer, "scale", 1.0, target)[at] = scale
                up = up * scale[:, None]
                added = None if added is None else added * scale
            if added is not None:
                self._vector(layer, "added", 0.0, target)[at] = added
            layer.pieces.append(LoraPiece(narrow, up.T.to(dtype).contiguous(), span.start))

    def _length(
        self, target: Target, change: Change, down: Tensor, up: Tensor, at: slice
    ) -> Tensor:
        """Compute the row norms of a weight with its change (Liu et al., arXiv 2402.09353):
        [outputs].

        Uses only the weight's squared norms and its product with `down`.
        """
        spec = self.by._specs[target.layer]
        if spec.input_shard.total != spec.inputs:
            raise self._fail(change.name, "DoRA of a layer that ranks share: not supported yet")
        wide = down.float()
        mixed = self.by._product(target.layer, wide)[:, at].float().T
        squares = self.by._lengths(target.layer)[at] + 2 * (up * mixed).sum(1)
        return (squares + ((up @ (wide @ wide.T)) * up).sum(1)).clamp_min(0).sqrt()

    def _vector(self, layer: LayerChange, what: str, value: float, target: Target) -> Tensor:
        """Return a vector of a layer's change; creates it if missing."""
        vector: Tensor | None = getattr(layer, what)
        if vector is None:
            vector = torch.full((self.by._specs[target.layer].outputs,), value)
            setattr(layer, what, vector)
        return vector

    # Expert stacks.

    def _stack(self, change: Change, down: Tensor, up: Tensor) -> tuple[str, Target, bool] | None:
        """Find the stack that a parameter's change is for, by shape: (stored name, target, whether
        `down` takes outputs, as in PEFT before 0.19).
        """
        module = self._named(change.module, "")
        candidates = [(n, n) for n in self.by._targets.below(module)]
        stack = self.by._targets.get(module)
        if stack is not None and stack.experts:
            candidates.append((module, change.module))
        shape = (down.shape[1], up.shape[0])
        targets = [(stored, self.by._targets.get(name)) for name, stored in candidates]
        for turned in (False, True):
            for stored, target in targets:
                if target is None:
                    continue
                fits = (target.inputs, target.outputs)
                if shape == (fits[::-1] if turned else fits):
                    return stored, target, turned
        if candidates and targets:
            shapes = ", ".join(f"[{p.outputs}, {p.inputs}]" for _, p in targets if p is not None)
            raise self._fail(change.name, f"changes [{shape[1]}, {shape[0]}], experts are {shapes}")
        return None

    def _take_stack(
        self, change: Change, down: Tensor, up: Tensor, stack: tuple[str, Target, bool]
    ) -> None:
        """Convert the change of a stack; in PEFT `down` is ordered by expert and `up` by rank."""
        stored, target, turned = stack
        experts = target.experts
        self._rank(change, len(down), stored, experts)
        if change.added is not None or change.magnitude is not None:
            raise self._fail(
                change.name, "a bias or magnitude of a stack of experts: not supported yet"
            )
        narrow = down.float().unflatten(0, (experts, -1))
        wide = up.float().unflatten(1, (-1, experts)).permute(2, 0, 1)
        wide = wide * self.settings.scaling(stored)
        if turned:
            narrow, wide = wide.transpose(1, 2), narrow.transpose(1, 2)
        for name, rows in self._rows(stored, wide).items():
            at = self.by.target(name, change.name, self.file)
            self._fits(change.name, (rows.shape[1], narrow.shape[2]), (at.outputs, at.inputs))
            layer = self._layer(at)
            for expert in range(experts):
                pieces = layer.experts.setdefault(expert, [])
                pieces += [
                    LoraPiece(narrow[expert].contiguous(), part.T.contiguous(), span.start)
                    for span in at.slices
                    for part in [rows[expert, span.source : span.source + span.size]]
                ]

    # Replacements of the base model's tensors.

    def _take_weight(self, change: Change, weight: Tensor) -> None:
        if weight.dim() == 1:
            message = f"the model has no norm {change.module} that an adapter can change: {_MERGE}"
            raise self._fail(change.name, message)
        for name, piece in self._replacing(change, ".weight", weight):
            target = self.by.target(name, change.name, self.file)
            self._fits(change.name, tuple(piece.shape), self._shape(target))
            if target.experts or target.expert is not None:
                raise self._fail(change.name, "experts in modules_to_save: not supported yet")
            layer, spec = self._layer(target), self.by._specs[target.layer]
            replacement = piece.to(getattr(torch, spec.dtype)).contiguous()
            if spec.kind is LinearKind.EMBEDDING:
                self._replaced = (target.layer, replacement)
                layer.weights.append((0, replacement))
                continue
            for span in target.slices:
                rows = replacement[span.source : span.source + span.size, target.columns]
                layer.weights.append((span.start, rows))

    def _take_norm(self, change: Change, what: str, tensor: Tensor) -> bool:
        """Convert the weight or bias of a norm; False for other layers."""
        stored = f"{change.module}.{what}"
        try:
            renamed = [(n.removesuffix(f".{what}"), t) for n, t in self.by._names(stored, tensor)]
        except (RuntimeError, ValueError, IndexError):
            renamed = []
        for name, piece in [*renamed, (change.module, tensor)]:
            if name not in self.by._norms:
                continue
            if reason := self.by._refused(name):
                raise self._fail(change.name, f"a norm in modules_to_save: {reason}: {_MERGE}")
            if self.by._elsewhere:
                reason = "norms of adapters with pipeline stages: not supported yet"
                raise self._fail(change.name, f"{reason}; {_MERGE}")
            self._fits(change.name, tuple(piece.shape), (self.by._norms[name],))
            layer = self.layers.setdefault(name, LayerChange())
            if what == "weight":
                layer.norm = piece
            else:
                layer.norm_bias = piece
            return True
        return False

    def _shape(self, target: Target) -> tuple[int, int]:
        return target.outputs, target.inputs

    def _take_bias(self, change: Change, bias: Tensor) -> None:
        for name, piece in self._replacing(change, ".bias", bias):
            target = self.by.target(name, change.name, self.file)
            self._fits(change.name, tuple(piece.shape), (target.outputs,))
            if not self.by._specs[target.layer].bias and change.weight is None:
                raise self._fail(change.name, "the layer has no bias")
            layer = self._layer(target)
            vector = self._vector(layer, "bias", 0.0, target)
            if layer.rebiased is None:
                layer.rebiased = torch.zeros(len(vector), dtype=torch.bool)
            for span in target.slices:
                at = slice(span.start, span.start + span.size)
                vector[at] = piece[span.source : span.source + span.size].float()
                layer.rebiased[at] = True

    def _replacing(self, change: Change, suffix: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Convert a stored tensor to the model's names, as for a checkpoint."""
        stored = change.module + suffix
        try:
            renamed = list(self.by._names(stored, tensor))
        except (RuntimeError, ValueError, IndexError) as error:
            message = f"{list(tensor.shape)} does not fit the model: {error}"
            raise self._fail(stored, message) from error
        pieces = [(name.removesuffix(suffix), piece) for name, piece in renamed]
        if not any(self.by._targets.get(name) for name, _ in pieces):
            return [(change.module, tensor)]
        return pieces

    def _fits(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        """Raise CheckpointError if a change has another shape than its target."""
        if shape != expected:
            if shape[1:] == expected[1:]:
                name = name.replace("lora_A", "lora_B")
            raise self._fail(name, f"is for {list(shape)}, the model's layer is {list(expected)}")
