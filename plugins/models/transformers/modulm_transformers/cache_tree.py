"""What a cache of transformers consists of, learned from two short runs.

The library's cache objects differ by model: keys and values, convolution and recurrent states, keys
of indexers. A part that grows by one entry per token is stored in blocks, a part of constant shape
in slots of states. Counters follow from the number of tokens. Then a cache of any row is built
anew for a step, and what the step changed is stored again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from modulm.errors import UnsupportedError

__all__ = ["CacheTree", "Growing"]

#: Keys of dictionaries, names of attributes, and indices on the way to a part.
Path = tuple[Any, ...]
_CROSS = ("cross_attention_cache", "is_updated")


@frozen
class Growing:
    """A part with one entry per token.

    dim: the dimension of tokens. shape: of an entry, with the dimension of tokens left out.
    window: tokens that the layer keeps, if it forgets others.
    """

    path: Path
    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    window: int | None

    @property
    def width(self) -> int:
        """Numbers per token."""
        return int(torch.Size(self.shape).numel())

    def rows(self, tensor: Tensor, count: int) -> Tensor:
        """[count, width]: the last entries of a part."""
        moved = tensor.movedim(self.dim, 0)
        return moved[len(moved) - count :].reshape(count, -1)

    def tensor(self, rows: Tensor) -> Tensor:
        """A part from [tokens, width]."""
        return rows.view(len(rows), *self.shape).movedim(0, self.dim).contiguous()

    def first(self, tokens: int) -> int:
        """The first of a row's `tokens` that the library would still keep."""
        return 0 if self.window is None else max(tokens - self.window + 1, 0)


class CacheTree:
    """The parts of a model's cache, and a template of the others."""

    def __init__(self, short: Any, long: Any, tokens: tuple[int, int]) -> None:
        self.template = _copied(short)
        self.growing: list[Growing] = []
        self.states: list[tuple[Path, Tensor]] = []
        self._counters: list[tuple[Path, int]] = []
        windows = {
            path[:-1]: value for path, value in _leaves(short) if path[-1] == "sliding_window"
        }
        after = dict(_leaves(long))
        before = dict(_leaves(short))
        if before.keys() != after.keys():
            raise UnsupportedError("its cache has other parts after more tokens")
        for path, value in before.items():
            self._classify(path, value, after[path], tokens, windows.get(path[:-1]))

    def _classify(
        self, path: Path, short: Any, long: Any, tokens: tuple[int, int], window: Any
    ) -> None:
        if not isinstance(short, Tensor):
            if short == long:
                return
            if not isinstance(short, int) or (short - tokens[0]) != (long - tokens[1]):
                raise UnsupportedError(f"its cache has {path[-1]}, which is no count of tokens")
            self._counters.append((path, short - tokens[0]))
            return
        grown = [d for d in range(short.dim()) if short.shape[d] != long.shape[d]]
        kept = isinstance(window, int) and path[-1] in ("keys", "values")
        if kept and not grown:
            grown = [short.dim() - 2]
        if not grown:
            if short.is_floating_point() or not torch.equal(short, long):
                self.states.append((path, short))
            return
        (dim, *more) = grown
        counted = (short.shape[dim], long.shape[dim]) == tokens
        if more or not (counted or kept):
            raise UnsupportedError(
                f"its cache has {path[-1]}, which grows by other steps than tokens"
            )
        shape = (*short.shape[:dim], *short.shape[dim + 1 :])
        self.growing.append(Growing(path, dim, shape, short.dtype, window if kept else None))

    def build(
        self,
        tokens: int,
        rows: Callable[[int, int, int], Tensor],
        state: Callable[[int], Tensor],
    ) -> Any:
        """A cache of a row with `tokens` tokens.

        rows: (index of a growing part, first token, end) -> [tokens, width]. state: index -> the
        tensor.
        """
        values: dict[Path, Any] = {path: base + tokens for path, base in self._counters}
        for index, part in enumerate(self.growing):
            values[part.path] = part.tensor(rows(index, part.first(tokens), tokens))
        for index, (path, _) in enumerate(self.states):
            values[path] = state(index)
        cache = _copied(self.template, values)
        _forget_crossed(cache)
        return cache

    def parts(self, cache: Any) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of the growing parts, and those of the states."""
        grown = [_at(cache, part.path) for part in self.growing]
        return grown, [_at(cache, path) for path, _ in self.states]


def _forget_crossed(cache: Any) -> None:
    """Empty the keys and values of cross attention: they are computed from the encoder's output."""
    if hasattr(cache, _CROSS[0]):
        cache.cross_attention_cache = type(cache.cross_attention_cache)()
        cache.is_updated = {}


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Tensors, numbers and other single values of a cache object."""
    for key, item in _items(value):
        if key in _CROSS:
            continue
        if _is_leaf(item):
            yield (*path, key), item
        else:
            yield from _leaves(item, (*path, key))


def _is_leaf(value: Any) -> bool:
    plain = isinstance(value, Tensor | int | float | str | bool | torch.dtype | torch.device | type)
    return (
        plain or value is None or not (_items(value) or isinstance(value, Mapping | list | tuple))
    )


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    attributes = getattr(value, "__dict__", None)
    ours = type(value).__module__.startswith("transformers")
    return list(attributes.items()) if attributes and ours else []


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key] if isinstance(value, Mapping | list | tuple) else getattr(value, key)
    return value


def _copied(value: Any, values: Mapping[Path, Any] | None = None, path: Path = ()) -> Any:
    """A copy of a cache with other leaves; tensors that are not replaced are shared."""
    if values is not None and path in values:
        return values[path]
    if _is_leaf(value):
        return value
    if isinstance(value, list | tuple):
        return type(value)(_copied(item, values, (*path, i)) for i, item in enumerate(value))
    if isinstance(value, Mapping):
        new = copy.copy(value)
        for key, item in value.items():
            new[key] = _copied(item, values, (*path, key))  # type: ignore[index]
        return new
    new = copy.copy(value)
    for key, item in vars(value).items():
        new.__dict__[key] = _copied(item, values, (*path, key))
    return new
