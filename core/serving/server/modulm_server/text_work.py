"""Work on texts, off the event loop and within bounds: rendering, tokenizing, detokenizing.

What a text costs grows with its length, so lengths come first: a text that no context could hold
is refused unread. What is long has a thread of its own, so that shorter texts need not wait for it,
and only so much of it may wait.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

from modulm.errors import ContextLengthExceeded, QueueFull

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["TextWork", "characters"]

#: Characters up to which work is done where it stands: a thread costs more than that.
_INLINE = 1_000
#: Characters from which on work is done by the thread for what is long.
_LONG = 200_000
#: Characters of long texts that may wait beside the one that is worked on.
_WAITING = 16 << 20
#: Characters that are always looked at, and those per token of the context: real texts have about
#: four, long runs of white space rarely more than sixteen.
_LEAST, _PER_TOKEN = 1 << 20, 16
#: What a message or a part of one counts beside its text.
_PART = 64


class TextWork:
    """The threads that work on texts, and the lengths that they accept.

    tokenizer: None on a server without one. threads: for texts of ordinary length; 0 for half the
    processors, four at most.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int, threads: int = 0) -> None:
        self.most = max(_LEAST, _PER_TOKEN * max_model_len)
        self._tokenizer = tokenizer
        self._length = max_model_len
        threads = threads or min(4, max(1, (os.cpu_count() or 1) // 2))
        self._short = ThreadPoolExecutor(threads, thread_name_prefix="modulm-text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="modulm-long-text")
        self._held = 0

    @cached_property
    def most_per_token(self) -> int | None:
        """Characters that one token can stand for; None where the tokenizer may drop some."""
        core = None if self._tokenizer is None else self._tokenizer.core
        if core is None or core.normalizer is not None:
            return None
        added = core.get_added_tokens_decoder().values()
        drops = type(core.decoder).__name__ != "ByteLevel" or any(
            token.lstrip or token.rstrip for token in added
        )
        return None if drops else max(map(len, core.get_vocab()), default=None)

    async def run(
        self, size: int, function: Callable[..., Any], *args: Any, **keywords: Any
    ) -> Any:
        """Call here if `size`, in characters, is small, else in a thread.

        Raises QueueFull if too much long text waits already.
        """
        if size <= _INLINE:
            return function(*args, **keywords)
        if size < _LONG:
            return await self._in(self._short, function, args, keywords)
        if self._held and self._held + size > _WAITING:
            raise QueueFull("too much text waits to be tokenized; try again later")
        self._held += size
        try:
            return await self._in(self._long, function, args, keywords)
        finally:
            self._held -= size

    @staticmethod
    async def _in(
        pool: ThreadPoolExecutor,
        function: Callable[..., Any],
        args: Sequence[Any],
        keywords: Mapping[str, Any],
    ) -> Any:
        return await asyncio.get_running_loop().run_in_executor(
            pool, lambda: function(*args, **keywords)
        )

    def check(self, size: int, param: str = "prompt") -> None:
        """Raise ContextLengthExceeded for more characters than are ever read."""
        if size > self.most:
            raise ContextLengthExceeded(
                f"{param}: a text of {size} characters is too long to be tokenized; at most "
                f"{self.most} are, for the model's context of {self._length} tokens",
                param,
            )

    def check_fits(self, size: int, param: str = "prompt") -> None:
        """Raise it also for more characters than the context can hold, for certain.

        Slow when the first long text comes.
        """
        self.check(size, param)
        if size <= self._length:
            return
        most = self.most_per_token
        if most is not None and size > most * self._length:
            raise ContextLengthExceeded(
                f"{param}: a text of {size} characters has at least {-(-size // most)} tokens, and "
                f"the model's context is {self._length} tokens",
                param,
            )


def characters(messages: Sequence[Mapping[str, Any]], enough: int) -> int:
    """Roughly, the characters in the messages; counting ends when there are more than `enough`."""
    total = 0
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        total += _PART
        if isinstance(content, str):
            total += len(content)
        for part in content if isinstance(content, list) else ():
            text = part.get("text") if isinstance(part, Mapping) else part
            total += _PART + (len(text) if isinstance(text, str) else 0)
            if total > enough:
                return total
        if total > enough:
            return total
    return total
