"""Logits processors in another process: the stand-in here, and the class that serves it there.

A processor may have a state for each row, which is lost with its process. Rows that were admitted
before it ended get an error from then on, instead of other logits than they should have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Self
from weakref import finalize

import numpy as np
import torch

from modulm.contracts.sampling import LogitsProcessor, RowView, SamplingParams
from modulm.errors import PluginBroken
from modulm_isolation.child import Questions, resolve
from modulm_isolation.process import IsolatedDriver, driver_of
from modulm_wire.packing import pack_params, unpack_params

if TYPE_CHECKING:
    from modulm.plugins.declaration import Declaration

__all__ = ["LogitsServer", "stand_in"]

_CPU = torch.device("cpu")
_numbers = count()


def _overrides(cls: type, name: str) -> bool:
    own, base = getattr(cls, name), getattr(LogitsProcessor, name)
    return getattr(own, "__func__", own) is not getattr(base, "__func__", base)


def _pack_config(config: Any) -> Any:
    from modulm_wire.frames import pack_config

    return None if config is None else pack_config(config)


def _unpack_config(packed: Any) -> Any:
    from modulm_wire.frames import unpack_config

    return None if packed is None else unpack_config(packed)


class _Isolated(LogitsProcessor):
    """The stand-in of a processor. `remote` and `facts` are set by `stand_in`."""

    remote: IsolatedDriver
    facts: Mapping[str, Any]

    def __init__(self, vocabulary: int, device: torch.device, config: Any = None) -> None:
        super().__init__(vocabulary, device)
        self._config = _pack_config(config) if self.facts["open"] else None
        self._number = next(_numbers)
        self._rows: dict[int, int] = {}
        self._open()
        finalize(self, self.remote.process.forget, self._number)

    @classmethod
    def open(cls, config: Any, vocabulary: int, device: torch.device) -> Self:
        """Create the engine's instance."""
        return cls(vocabulary, device, config)

    @classmethod
    def validate(cls, params: SamplingParams) -> None:
        """Let the process validate parameters, if the processor does so."""
        if cls.facts["validate"]:
            cls.remote.call("validate", pack_params(params))

    @classmethod
    def validate_for(cls, params: SamplingParams, config: Any) -> None:
        """Let the process validate parameters with the configuration."""
        if cls.facts["validate_for"]:
            cls.remote.call("validate_for", pack_params(params), _pack_config(config))
        else:
            cls.validate(params)

    @property
    def keeps_argmax(self) -> bool:
        """Whether greedy rows may skip this processor."""
        return self._keeps

    def _open(self) -> None:
        arguments = self._number, self._config, self.vocabulary
        self._keeps: bool = self.remote.call("open", *arguments)
        self._generation = self.remote.process.generation

    def admit(self, view: RowView) -> bool:
        """Start a row; return whether to process its logits."""
        process = self.remote.process
        if process.pid is None or process.generation != self._generation:
            self._open()
        admitted, self._keeps = self.remote.call("admit", self._number, _pack_view(view, True))
        if admitted:
            self._rows[view.row] = self._generation
        return bool(admitted)

    def release(self, row: int) -> None:
        """Forget a row that was admitted."""
        if self._rows.pop(row, None) == self.remote.process.generation:
            self.remote.call("release", self._number, row)

    def apply_row(self, view: RowView, logits: torch.Tensor) -> torch.Tensor:
        """Process one row's logits."""
        self._check(view)
        rows = logits.detach().to(_CPU, torch.float32).unsqueeze(0).numpy()
        result = self.remote.call("apply_row", self._number, _pack_view(view), rows)
        return torch.from_numpy(result).to(logits.device)

    def apply(
        self, views: Sequence[RowView], logits: torch.Tensor, index: Sequence[int]
    ) -> torch.Tensor:
        """Process the admitted rows of a step, in one call."""
        for view in views:
            self._check(view)
        rows = logits[list(index)].to(_CPU, torch.float32).numpy()
        packed = [_pack_view(view) for view in views]
        result = self.remote.call("apply", self._number, packed, rows)
        logits[list(index)] = torch.from_numpy(result).to(logits.device)
        return logits

    def _check(self, view: RowView) -> None:
        process = self.remote.process
        if process.pid is None or self._rows.get(view.row) != process.generation:
            raise PluginBroken(
                f"{self.remote.declaration}: its process ended while this request ran"
            )


def _pack_view(view: RowView, whole: bool = False) -> list[Any]:
    """Row and output; with `whole` also parameters and prompt, which do not change."""
    output = np.asarray(view.output, dtype=np.int64)
    if not whole:
        return [view.row, output]
    return [view.row, output, pack_params(view.params), np.asarray(view.prompt, dtype=np.int64)]


def stand_in(declaration: Declaration, term: str) -> type[LogitsProcessor]:
    """Return the class that stands for a logits processor. Raises PluginBroken."""
    remote = driver_of(declaration, term, "modulm_isolation.logits:LogitsServer", ("torch",))
    facts = remote.call("describe")
    api = facts["api"]
    members = {
        "remote": remote,
        "facts": facts,
        "api": tuple(api) if isinstance(api, list) else api,
        "fields": tuple(facts["fields"]),
        "__doc__": f"Stands for {declaration}, which runs in another process.",
    }
    return type(facts["class"], (_Isolated,), members)


class LogitsServer:
    """Serves logits processors, by number, in the isolated process. Their device is the CPU."""

    def __init__(self, questions: Questions) -> None:
        self._processors: dict[int, LogitsProcessor] = {}
        self._views: dict[tuple[int, int], RowView] = {}
        torch.set_num_threads(1)

    def describe(self, target: str) -> dict[str, Any]:
        """What the class says of itself."""
        cls = resolve(target)
        facts = {name: _overrides(cls, name) for name in ("open", "validate", "validate_for")}
        return {
            **facts,
            "class": cls.__name__,
            "api": getattr(cls, "api", None),
            "fields": list(cls.fields),
        }

    def validate(self, target: str, params: Any) -> None:
        """Raise RequestError for invalid parameters."""
        resolve(target).validate(unpack_params(params))

    def validate_for(self, target: str, params: Any, config: Any) -> None:
        """Raise RequestError for parameters that are invalid with the configuration."""
        resolve(target).validate_for(unpack_params(params), _unpack_config(config))

    def open(self, target: str, number: int, config: Any, vocabulary: int) -> bool:
        """Create an engine's instance; return `keeps_argmax`."""
        processor = resolve(target).open(_unpack_config(config), vocabulary, _CPU)
        self._processors[number] = processor
        return bool(processor.keeps_argmax)

    def admit(self, target: str, number: int, view: Any) -> list[bool]:
        """Start a row; return whether it is processed, and `keeps_argmax`."""
        row, output, params, prompt = view
        packed = unpack_params(params)
        if not isinstance(packed, SamplingParams):
            raise TypeError("rows of logits processors have SamplingParams")
        opened = RowView(row, packed, prompt.tolist(), output.tolist())
        processor = self._processors[number]
        admitted = bool(processor.admit(opened))
        if admitted:
            self._views[number, row] = opened
        return [admitted, bool(processor.keeps_argmax)]

    def release(self, target: str, number: int, row: int) -> None:
        """Forget a row."""
        self._views.pop((number, row), None)
        self._processors[number].release(row)

    def _view(self, number: int, packed: Any) -> RowView:
        row, output = packed
        view = self._views[number, row]
        tokens: Any = view.output
        tokens[:] = output.tolist()
        return view

    def apply_row(self, target: str, number: int, packed: Any, rows: np.ndarray) -> np.ndarray:
        """Process one row."""
        logits = torch.from_numpy(rows)[0]
        result = self._processors[number].apply_row(self._view(number, packed), logits)
        return _checked(result, logits.shape)

    def apply(self, target: str, number: int, packed: Any, rows: np.ndarray) -> np.ndarray:
        """Process the rows of a step."""
        views = [self._view(number, each) for each in packed]
        logits = torch.from_numpy(rows)
        processor = self._processors[number]
        return _checked(processor.apply(views, logits, range(len(views))), logits.shape)

    def forget(self, numbers: Sequence[int]) -> None:
        """Drop processors whose stand-ins are gone."""
        for number in numbers:
            if self._processors.pop(number, None) is not None:
                for key in [key for key in self._views if key[0] == number]:
                    del self._views[key]


def _checked(result: Any, shape: Sequence[int]) -> np.ndarray:
    if not isinstance(result, torch.Tensor) or result.shape != torch.Size(shape):
        raise TypeError(f"it gave {type(result).__name__} {getattr(result, 'shape', '')}")
    array: np.ndarray = result.to(torch.float32).numpy()
    return array
