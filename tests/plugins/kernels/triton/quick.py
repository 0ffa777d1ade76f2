"""Triton's interpreter without what takes most of its time.

It patches the language anew for each call of a function inside a kernel, and repeats integer
arithmetic in 64 bits to find overflows. Patched once, and without the second, it is three times as
fast; a process that interprets compiles nothing, so nothing needs the language as it was.
"""

from __future__ import annotations

from dataclasses import replace

__all__ = ["quicken"]


class _NoRestore:
    def restore(self) -> None:
        """Nothing: what was patched stays so."""


def quicken() -> None:
    """Change the interpreter of this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, done = interpreter._patch_lang, set()

    def once(function):
        names = [value for value in function.__globals__.values() if value in (tl, tl.core)]
        if not done.issuperset(map(id, names)):
            done.update(map(id, names))
            patch(function)
        return _NoRestore()

    interpreter._patch_lang = once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
