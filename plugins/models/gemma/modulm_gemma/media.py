"""How prompts of Gemma 3 take images: the tokens of each see each other in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from modulm_media import MediaFamily

__all__ = ["Gemma3Family"]

#: Most line ends that one token stands for.
_LINES = 31


class Gemma3Family(MediaFamily):
    """Gemma 3. Empty lines stand around an image, and are one token with those of the text."""

    bidirectional = True

    def merged(self, left: int, right: int) -> int | None:
        count = self._lines.get(left, 0), self._lines.get(right, 0)
        return self._tokens.get(sum(count)) if all(count) else None

    @cached_property
    def _tokens(self) -> Mapping[int, int]:
        """Number of line ends -> their token, where there is one."""
        encode = self.processor.tokenizer.encode
        every = {n: encode("\n" * n, add_special_tokens=False) for n in range(1, _LINES + 1)}
        return {count: ids[0] for count, ids in every.items() if len(ids) == 1}

    @cached_property
    def _lines(self) -> Mapping[int, int]:
        return {token: count for count, token in self._tokens.items()}
