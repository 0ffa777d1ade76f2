"""Mapping of a checkpoint's weight names and layouts to the model's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["API", "Change", "Rewrite", "WeightNames"]

API = 1

#: (name, tensor) -> replacement names and tensors; must also work on meta tensors.
Change = Callable[[str, "Tensor"], Iterable[tuple[str, "Tensor"]]]


def _patterns(items: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(item) for item in items)


@frozen
class Rewrite:
    """Replaces tensors whose (renamed) name matches `pattern` by the result of `change`.

    For example to transpose, split or reorder them.
    """

    pattern: str
    change: Change


@frozen
class WeightNames:
    """Rules applied to every tensor of a checkpoint, in this order.

    rename: regular expressions and replacements, each applied to the name (`re.sub`). ignore:
    regular expressions of names that the model does not need. rewrite: see `Rewrite`. Fused linear
    layers need no entry: they accept either their parts or the fused tensor.
    """

    rename: tuple[tuple[str, str], ...] = ()
    ignore: tuple[str, ...] = ()
    rewrite: tuple[Rewrite, ...] = ()
    _ignored: tuple[re.Pattern[str], ...] = field(init=False, eq=False, repr=False)

    @_ignored.default
    def _compile(self) -> tuple[re.Pattern[str], ...]:
        return _patterns((*_NEVER_NEEDED, *self.ignore))

    def name(self, stored: str) -> str | None:
        """Return the model's name for a stored tensor, or None if it is not needed."""
        for pattern, replacement in self.rename:
            stored = re.sub(pattern, replacement, stored)
        return None if any(p.search(stored) for p in self._ignored) else stored

    def apply(self, stored: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's tensors for a stored one: none, one or several."""
        name = self.name(stored)
        if name is None:
            return
        for rewrite in self.rewrite:
            if re.search(rewrite.pattern, name):
                yield from rewrite.change(name, tensor)
                return
        yield name, tensor


#: Buffers saved by old versions of transformers that can be computed from the configuration.
_NEVER_NEEDED = (
    r"rotary_emb\.inv_freq$",
    r"\.rotary_emb\.(cos|sin)_cached$",
    r"attn\.masked_bias$",
)
