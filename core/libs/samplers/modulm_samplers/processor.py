"""Base class of logits processors configured by a request's extra arguments."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import attrs

from modulm.contracts.sampling import LogitsProcessor, RowView, SamplingParams
from modulm.errors import RequestError

if TYPE_CHECKING:
    import torch

__all__ = ["SettingsProcessor", "number"]

S = TypeVar("S")


def number(
    default: float, *, least: float = -math.inf, most: float = math.inf, whole: bool = False
) -> Any:
    """A field of settings: a finite number between two bounds. whole: an integer."""

    def convert(value: Any, attribute: attrs.Attribute[Any]) -> float:
        kinds = int if whole else (int, float)
        valid = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
        if not valid or not least <= value <= most:
            kind = "a whole number" if whole else "a number"
            bounds = [f"of at least {least:g}"] if least > -math.inf else []
            bounds += [f"at most {most:g}"] if most < math.inf else []
            message = f"{attribute.name} must be {kind} {' and '.join(bounds)}".rstrip()
            raise RequestError(message, attribute.name)
        return int(value) if whole else float(value)

    converter = attrs.Converter(convert, takes_field=True)
    return attrs.field(default=default, converter=converter)


class SettingsProcessor(LogitsProcessor, Generic[S]):
    """A logits processor with settings per row. It runs for rows whose settings are `active`.

    `settings` is an attrs class; its fields are the arguments. The processor runs after temperature
    scaling and skips greedy rows.
    """

    api = 1
    fields = ("extra_args",)
    settings: ClassVar[type[Any]]

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        super().__init__(vocabulary, device)
        self.rows: dict[int, S] = {}

    @classmethod
    def arguments(cls) -> tuple[str, ...]:
        """Names of the arguments."""
        return tuple(attribute.name for attribute in attrs.fields(cls.settings))

    @classmethod
    def settings_of(cls, params: SamplingParams) -> S | None:
        """Return a request's settings, or None if they turn it off. Raises RequestError."""
        given = params.extra_args or {}
        values = {name: given[name] for name in cls.arguments() if given.get(name) is not None}
        settings = cls.settings(**values) if values else None
        return settings if settings is not None and settings.active else None

    @classmethod
    def validate(cls, params: SamplingParams) -> None:
        cls.settings_of(params)

    @property
    def keeps_argmax(self) -> bool:
        return True

    def admit(self, view: RowView) -> bool:
        settings = self.settings_of(view.params)
        if settings is None:
            return False
        self.rows[view.row] = settings
        return True

    def release(self, row: int) -> None:
        self.rows.pop(row, None)
