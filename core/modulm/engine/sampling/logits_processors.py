"""Logits processors: resolved once; an exception fails only the row that caused it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from modulm.contracts.sampling import LogitsProcessor, RowView, SamplingParams
from modulm.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from modulm.plugins.manager import PluginManager

T = TypeVar("T")

__all__ = ["Processors", "class_at", "processor_classes"]


def class_at(path: str, kind: type[T], field: str) -> type[T]:
    """Import a subclass of `kind` from "pkg.mod:Class" or "pkg.mod.Class".

    Raises ConfigError for `field`.
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(field, f"{path!r} cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        raise ConfigError(field, f"{path!r} is not a {kind.__module__}.{kind.__name__}")
    return cls


def processor_classes(
    entries: Sequence[str | type[LogitsProcessor]] | None, plugins: PluginManager
) -> tuple[type[LogitsProcessor], ...]:
    """Return installed processors (group `modulm.logits_processors`), then the given ones.

    entries: `--logits-processors`: classes, paths, or names of installed ones, which always run.
    """
    installed = [declaration.name for declaration in plugins.names("logits_processors")]
    classes = [plugins.load("logits_processors", name) for name in installed]
    for entry in entries or ():
        if isinstance(entry, str) and entry not in installed:
            classes.append(class_at(entry, LogitsProcessor, "logits_processors"))
        elif isinstance(entry, type):
            classes.append(entry)
    return tuple(dict.fromkeys(classes))


class Processors:
    """All processors of an engine, and the rows that each of them processes.

    Processors that keep the argmax run after the temperature, only for rows that are not greedy;
    the others run before the penalties.
    """

    def __init__(self, processors: Iterable[LogitsProcessor] = ()) -> None:
        self.all = tuple(processors)
        self._wants: dict[int, tuple[LogitsProcessor, ...]] = {}

    def processors_for(self, params: SamplingParams) -> tuple[LogitsProcessor, ...]:
        """Return the processors to call for a row with these parameters."""
        return tuple(
            each for each in self.all
            if not each.fields or any(getattr(params, name) is not None for name in each.fields)
        )  # fmt: skip

    def admit(self, view: RowView, processors: Sequence[LogitsProcessor]) -> tuple[bool, bool]:
        """Start a row; return whether processors run (before penalties, after temperature).

        If a processor raises, the others release the row and the exception propagates.
        """
        active: list[LogitsProcessor] = []
        try:
            active.extend(processor for processor in processors if processor.admit(view))
        except Exception:
            self._let_go(active, view.row)
            raise
        self._wants[view.row] = tuple(active)
        late = [processor.keeps_argmax for processor in active]
        return not all(late), any(late)

    def release(self, row: int) -> None:
        """Forget the row; unknown rows are ignored."""
        self._let_go(self._wants.pop(row, ()), row)

    @staticmethod
    def _let_go(processors: Sequence[LogitsProcessor], row: int) -> None:
        for processor in processors:
            try:
                processor.release(row)
            except Exception:  # noqa: S112 - the row is released in any case
                continue

    def apply(
        self, views: Mapping[int, RowView], logits: torch.Tensor, *, late: bool
    ) -> dict[int, str]:
        """Run the processors on their rows in place; return index -> error message.

        views: index into `logits` ([n, vocabulary] fp32) -> the row.
        """
        errors: dict[int, str] = {}
        for processor in self.all:
            if processor.keeps_argmax != late:
                continue
            indices = [
                index
                for index, view in views.items()
                if index not in errors and processor in self._wants.get(view.row, ())
            ]
            if indices:
                rows = [views[index] for index in indices]
                errors.update(_run(processor, rows, logits, indices))
        return errors


def _run(
    processor: LogitsProcessor, views: list[RowView], logits: torch.Tensor, indices: list[int]
) -> dict[int, str]:
    """Run one processor; if its batch version fails, run row by row to find the failing rows."""
    if type(processor).apply is not LogitsProcessor.apply:
        before = logits[indices]
        try:
            changed = processor.apply(views, logits, indices)
            if changed is not logits:
                logits[indices] = changed[indices]
        except Exception:
            logits[indices] = before
        else:
            return {}
    errors = {}
    for view, index in zip(views, indices, strict=True):
        try:
            logits[index] = processor.apply_row(view, logits[index].clone())
        except Exception as error:
            errors[index] = _message(processor, error)
    return errors


def _message(processor: Any, error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}"[:200]
    return f"logits processor {type(processor).__name__} failed: {reason}"
