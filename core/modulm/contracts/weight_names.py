"""How a checkpoint's weight names and layouts become the model's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["API", "Change", "Rewrite", "WeightNames"]

API = 1

#: (name, tensor) -> what it stands for; must also work on tensors of the meta device.
Change = Callable[[str, "Tensor"], Iterable[tuple[str, "Tensor"]]]


def _patterns(items: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(item) for item in items)


@frozen
class Rewrite:
    """Tensors whose (renamed) name matches `pattern` are replaced by what `change` makes of them:
    transposed, cut into several, reordered."""

    pattern: str
    change: Change


@frozen
class WeightNames:
    """A table, applied to every tensor of a checkpoint in this order.

    rename: regular expressions and replacements, each applied to the name (`re.sub`). ignore:
    names that match carry nothing the model needs. rewrite: see `Rewrite`. Fused layers need no
    entry: a fused linear layer knows the names of its parts and takes either
    them or the whole.
    """

    rename: tuple[tuple[str, str], ...] = ()
    ignore: tuple[str, ...] = ()
    rewrite: tuple[Rewrite, ...] = ()
    _ignored: tuple[re.Pattern[str], ...] = field(init=False, eq=False, repr=False)

    @_ignored.default
    def _compile(self) -> tuple[re.Pattern[str], ...]:
        return _patterns((*_NEVER_NEEDED, *self.ignore))

    def name(self, stored: str) -> str | None:
        """The model's name for a stored tensor, or None if it is not needed."""
        for pattern, replacement in self.rename:
            stored = re.sub(pattern, replacement, stored)
        return None if any(p.search(stored) for p in self._ignored) else stored

    def apply(self, stored: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What one stored tensor gives: nothing, itself renamed, or several."""
        name = self.name(stored)
        if name is None:
            return
        for rewrite in self.rewrite:
            if re.search(rewrite.pattern, name):
                yield from rewrite.change(name, tensor)
                return
        yield name, tensor


#: Buffers that old versions of transformers saved and that follow from the configuration.
_NEVER_NEEDED = (
    r"rotary_emb\.inv_freq$",
    r"\.rotary_emb\.(cos|sin)_cached$",
    r"attn\.masked_bias$",
)
