"""Names and layouts of checkpoints by transformers' tables of conversions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from attrs import define, field, frozen
from torch import Tensor

from modulm.contracts.weight_names import WeightNames
from modulm.errors import UnsupportedError
from modulm_layers.kv_scales import is_kv_scale

__all__ = ["Conversions", "ConvertedNames", "Source"]

_Region = tuple[slice, ...]
#: What a pattern may contain besides a name.
_PLAIN = re.compile(r"[\w.*]+")


@frozen(eq=False)
class Source:
    """A stored tensor that is part of a parameter.

    shape: after `transform`. region: the part of the parameter that it fills.
    """

    name: str
    shape: tuple[int, ...]
    region: _Region
    transform: Callable[[Tensor], Tensor] | None = None


@frozen(eq=False)
class _Rule:
    """A converter: patterns of stored names and of the parameter's name."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    ops: tuple[str, ...]


@define(eq=False)
class Conversions:
    """The conversions that apply to one model."""

    renamings: list[Any] = field(factory=list)
    converters: list[Any] = field(factory=list)
    rules: list[_Rule] = field(factory=list)
    prefix: str = ""
    names: dict[str, Any] = field(factory=dict)
    ignored: tuple[str, ...] = ()

    def learn(self, model: Any) -> None:
        """Read the library's tables. Raises UnsupportedError for conversions that only the library
        can do.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        transforms = get_model_conversion_mapping(model)
        self.converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self.renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
        self.prefix = model.base_model_prefix
        self.names = dict.fromkeys(model.state_dict(), True)
        self.ignored = tuple(model._keys_to_ignore_on_load_unexpected or ())
        self.rules = [
            rule for converter in self.converters if (rule := self._rule(converter)) is not None
        ]

    def forget(self) -> None:
        """Apply none: the library loads the weights itself."""
        self.renamings, self.converters, self.rules, self.names = [], [], [], {}

    def _rule(self, converter: Any) -> _Rule | None:
        targets = tuple(_bare(pattern) for pattern in converter._original_target_patterns)
        plain = all(_PLAIN.fullmatch(target) for target in targets)
        if plain and not any(target in name for target in targets for name in self.names):
            return None
        sources = tuple(_bare(pattern) for pattern in converter._original_source_patterns)
        rule = _Rule(sources, targets, tuple(_op(op) for op in converter.operations))
        if not all(_PLAIN.fullmatch(p) for p in (*sources, *targets)) or rule.ops not in _KNOWN:
            raise UnsupportedError(
                f"not supported yet outside transformers' own loader: {', '.join(rule.ops)} of "
                f"{', '.join(sources)}"
            )
        return rule

    def stored_names(self, stored: str) -> Sequence[str]:
        """The names that a stored tensor has here: several if it is cut into equal parts."""
        from transformers.core_model_loading import apply_converters, apply_renamings

        renamed = apply_renamings(stored, self.renamings)
        target, pattern = apply_converters(renamed, self.converters)
        if pattern is None:
            return (self._with_prefix(renamed, renamed),)
        renamed = self._with_prefix(renamed, target)
        for rule in self.rules:
            if rule.ops == ("chunk 0",) and (at := _matched(rule.sources[0], renamed)) is not None:
                return tuple(renamed[: at[0]] + t + renamed[at[1] :] for t in rule.targets)
        return (renamed,)

    def _with_prefix(self, renamed: str, target: str) -> str:
        """Add or strip the prefix of the base model where the model's names ask for it."""
        if target in self.names or not self.prefix:
            return renamed
        if target.removeprefix(f"{self.prefix}.") in self.names:
            return renamed.removeprefix(f"{self.prefix}.")
        added = f"{self.prefix}.{target}" in self.names
        return f"{self.prefix}.{renamed}" if added else renamed

    def parts_of(self, name: str) -> tuple[str, ...]:
        """Paths of the layers whose stored weights are concatenated to the linear layer `name`."""
        for rule in self.rules:
            if rule.ops != ("concatenate 0",):
                continue
            target = rule.targets[0].removesuffix(".weight")
            if name.endswith(target):
                head = name.removesuffix(target)
                return tuple(head + s.removesuffix(".weight") for s in rule.sources)
        return ()

    def expert_names(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """How experts are stored one by one, for the stack `name`: a path with {expert} and {part},
        and the parts. None if only the stack is stored.
        """
        for rule in self.rules:
            if rule.ops[0] != "merge 0" or not name.endswith(rule.targets[0]):
                continue
            paths = [pattern.removesuffix(".weight") for pattern in rule.sources]
            heads = {path.rpartition(".")[0] for path in paths}
            if len(heads) == 1:
                head = name.removesuffix(rule.targets[0]) + heads.pop().replace("*", "{expert}")
                return f"{head}.{{part}}", tuple(path.rpartition(".")[2] for path in paths)
        return None

    def sources(self, name: str, shape: tuple[int, ...]) -> Sequence[Source]:
        """The stored tensors of which a stack of experts is made; empty if it is stored whole."""
        for rule in self.rules:
            if rule.ops[0] != "merge 0" or not name.endswith(rule.targets[0]):
                continue
            head = name.removesuffix(rule.targets[0])
            flipped = "transpose" in rule.ops[-1]
            inner = shape[:0:-1] if flipped else shape[1:]
            rows = inner[0] // len(rule.sources)
            return [
                _source(head + pattern.replace("*", str(e)), e, i * rows, rows, inner, flipped)
                for e in range(shape[0])
                for i, pattern in enumerate(rule.sources)
            ]
        return ()


def _source(
    name: str, expert: int, first: int, rows: int, inner: tuple[int, ...], flipped: bool
) -> Source:
    """An expert's tensor: `rows` rows from `first` of the expert's part, which has shape `inner`
    before it is transposed.
    """
    along = (slice(first, first + rows), *(slice(0, size) for size in inner[1:]))
    shape = (rows, *inner[1:])
    if flipped:
        along, shape = along[::-1], shape[::-1]
    region = (slice(expert, expert + 1), *along)
    return Source(name, shape, region, _transposed if flipped else None)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t()


def _bare(pattern: str) -> str:
    return pattern.removeprefix("^").removesuffix("$").replace("\\.", ".").removeprefix(".")


def _op(op: Any) -> str:
    kind = type(op).__name__
    if kind == "MergeModulelist":
        return f"merge {op.dim}"
    if kind in ("Chunk", "Concatenate") and not op.num_shards_attribute:
        return f"{kind.lower()} {op.dim}"
    if kind == "Transpose":
        return f"transpose {op.dim0} {op.dim1}"
    return kind


_KNOWN = frozenset(
    {
        ("chunk 0",),
        ("concatenate 0",),
        ("merge 0",),
        ("merge 0", "concatenate 1"),
        ("merge 0", "transpose 1 2"),
        ("merge 0", "concatenate 1", "transpose 1 2"),
    }
)


def _matched(pattern: str, name: str) -> tuple[int, int] | None:
    expression = re.escape(pattern).replace(r"\*", r"\d+")
    found = re.search(expression, name)
    return None if found is None else found.span()


@frozen
class ConvertedNames(WeightNames):
    """Rules that are functions of transformers' tables."""

    conversions: Conversions = field(factory=Conversions, kw_only=True)

    def name(self, stored: str) -> str | None:
        """Return the first name that a stored tensor has here, or None if it is not needed."""
        if is_kv_scale(stored):  # read by `KeptScales`
            return None
        (first, *_) = self.conversions.stored_names(stored)
        return first if self._is_needed(first) else None

    def apply(self, stored: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's tensors for a stored one: none, one or several."""
        if is_kv_scale(stored):
            return
        names = self.conversions.stored_names(stored)
        for name, piece in zip(names, _pieces(tensor, len(names)), strict=True):
            if self._is_needed(name):
                yield name, piece

    def _is_needed(self, name: str) -> bool:
        """Whether a name is the model's, or none that the library ignores."""
        return name in self.conversions.names or WeightNames.name(self, name) is not None


def _pieces(tensor: Tensor, count: int) -> Iterable[Tensor]:
    return (tensor,) if count == 1 else tensor.chunk(count, 0)
