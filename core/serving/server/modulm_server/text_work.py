"""Runs rendering, tokenizing and detokenizing off the event loop, within limits.

The cost of a text grows with its length, so texts longer than any context are rejected unread. Long
texts have a thread of their own, so that short ones need not wait for them, and a limited queue.
The texts of each API key have their turns: one key's many need not end before another's first.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from modulm.errors import ContextLengthExceeded, QueueFull
from modulm_server.auth import current_owner
from modulm_server.pacing import FairSemaphore

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["TextWork", "characters"]

#: Characters up to which work runs on the event loop, where it is cheaper than in a thread.
_INLINE = 1_000
#: Characters from which work runs on the thread for long texts.
_LONG = 200_000
#: Maximum characters of long texts in the queue.
_WAITING = 16 << 20
#: Characters that are always accepted, and accepted characters per token of the context: real
#: texts have about four, long runs of white space rarely more than sixteen.
_LEAST, _PER_TOKEN = 1 << 20, 16
#: The size of a message or part in characters, without its text.
_PART = 64


class _Threads:
    """Threads for the work of API keys, each of which has its turn."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)
        # One more, which a thread begins without a turn of the event loop in between.
        self._free = FairSemaphore(count + 1)

    async def run(self, work: Callable[[], Any]) -> Any:
        """Call a function in a thread. If the caller is cancelled, the thread still ends it."""
        await self._free.acquire(current_owner())
        try:
            done = asyncio.get_running_loop().run_in_executor(self._pool, work)
        except BaseException:
            self._free.release()
            raise
        done.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(done)

    def close(self) -> None:
        """End the threads once their work is done."""
        self._pool.shutdown(wait=False)


class TextWork:
    """The threads for work on texts, and the accepted lengths.

    tokenizer: None on a server without one. threads: for texts of ordinary length; 0 means half the
    processors, at most four.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int, threads: int = 0) -> None:
        self.max_characters = max(_LEAST, _PER_TOKEN * max_model_len)
        self._tokenizer = tokenizer
        self._length = max_model_len
        threads = threads or min(4, max(1, (os.cpu_count() or 1) // 2))
        self._short = _Threads(threads, "modulm-text")
        self._rendering = _Threads(threads, "modulm-templates")
        self._long = _Threads(1, "modulm-long-text")
        self._long_characters = 0

    def close(self) -> None:
        """End the threads once their work is done."""
        for threads in (self._short, self._rendering, self._long):
            threads.close()

    @cached_property
    def max_characters_per_token(self) -> int | None:
        """The most characters of one token; None if the tokenizer may drop characters."""
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
        """Call a function, in a thread unless `size` in characters is small.

        Raises QueueFull if too much long text is waiting.
        """
        if size <= _INLINE:
            return function(*args, **keywords)
        return await self._in_thread(self._short, size, function, args, keywords)

    async def render(
        self, size: int, function: Callable[..., Any], *args: Any, **keywords: Any
    ) -> Any:
        """Like `run`, for a function that waits for a template process: always in a separate
        thread.
        """
        return await self._in_thread(self._rendering, size, function, args, keywords)

    async def _in_thread(
        self,
        threads: _Threads,
        size: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        keywords: Mapping[str, Any],
    ) -> Any:
        """Call a function in one of the threads, or in the one for long texts."""
        work = partial(function, *args, **keywords)
        if size < _LONG:
            return await threads.run(work)
        if self._long_characters and self._long_characters + size > _WAITING:
            raise QueueFull("too much text is waiting to be tokenized; try again later")
        self._long_characters += size
        try:
            return await self._long.run(work)
        finally:
            self._long_characters -= size

    def check(self, size: int, param: str = "prompt") -> None:
        """Raise ContextLengthExceeded for a text that is too long to tokenize."""
        if size > self.max_characters:
            raise ContextLengthExceeded(
                f"{param}: {size} characters are too many to tokenize; the limit is "
                f"{self.max_characters}, for the model's context of {self._length} tokens",
                param,
            )

    def check_fits(self, size: int, param: str = "prompt") -> None:
        """Raise ContextLengthExceeded also for a text that certainly exceeds the context.

        Slow for the first long text.
        """
        self.check(size, param)
        if size <= self._length:
            return
        most = self.max_characters_per_token
        if most is not None and size > most * self._length:
            raise ContextLengthExceeded(
                f"{param}: {size} characters are at least {-(-size // most)} tokens, and the "
                f"model's context is {self._length} tokens",
                param,
            )


def characters(messages: Sequence[Mapping[str, Any]], enough: int) -> int:
    """Estimate the characters in messages; stops counting beyond `enough`."""
    total = 0
    for message in messages:
        content = message.get("content") if _is_object(message) else None
        total += _PART
        if isinstance(content, str):
            total += len(content)
        for part in content if isinstance(content, list) else ():
            text = part.get("text") if _is_object(part) else part
            total += _PART + (len(text) if isinstance(text, str) else 0)
            if total > enough:
                return total
        if total > enough:
            return total
    return total


def _is_object(value: Any) -> bool:
    """Like isinstance, which takes ten times as long for Mapping."""
    return type(value) is dict or isinstance(value, Mapping)
