"""Drivers that misbehave, to test what surrounds them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from inspect import getattr_static
from typing import Any

import pytest
from attrs import field, frozen

from pytest_modulm.installation import Installation

__all__ = ["Faults", "InjectedError"]


class InjectedError(RuntimeError):
    """Raised by a method that `Faults.raising` replaced."""


@frozen(eq=False)
class Faults:
    """Makes methods of a class or object misbehave until the test ends.

    `calls` counts the calls that misbehaved, by method name.
    """

    _monkeypatch: pytest.MonkeyPatch
    _install: Installation
    calls: dict[str, int] = field(factory=dict)
    _over: threading.Event = field(factory=threading.Event)

    def raising(
        self, target: Any, method: str, error: BaseException | None = None, after: int = 0
    ) -> None:
        """Let a method raise, by default InjectedError, once it was called `after` times."""

        def fail(*arguments: Any, **named: Any) -> Any:
            raise error or InjectedError(f"{method} was made to fail")

        self._replace(target, method, lambda original: fail, after)

    def hanging(self, target: Any, method: str, after: int = 0) -> None:
        """Let a method wait until the test ends, and then raise InjectedError."""

        def wait(*arguments: Any, **named: Any) -> Any:
            self._over.wait()
            raise InjectedError(f"{method} was made to hang")

        self._replace(target, method, lambda original: wait, after)

    def wrong_shape(self, target: Any, method: str, after: int = 0) -> None:
        """Let a method lose the last item of what it returns: a tensor, an array or a sequence."""

        def shortened(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                result = original(*arguments, **named)
                return result[..., :-1] if hasattr(result, "shape") else result[:-1]

            return call

        self._replace(target, method, shortened, after)

    def wrong_version(self, driver: type) -> type:
        """Return a subclass that was written for a contract version that does not exist yet."""
        return type(driver.__name__, (driver,), {"api": 1_000_000, "__module__": driver.__module__})

    def slow_import(self, kind: str, name: str, seconds: float) -> str:
        """Install a driver whose import takes `seconds`; returns the distribution's name."""
        return self._broken(kind, name, f"import time\ntime.sleep({seconds!r})\n")

    def failing_import(self, kind: str, name: str) -> str:
        """Install a driver whose import raises; returns the distribution's name."""
        return self._broken(kind, name, "raise RuntimeError('the import was made to fail')\n")

    def _broken(self, kind: str, name: str, source: str) -> str:
        module = f"modulm_fault_{name.replace('-', '_').lower()}"
        distribution = module.replace("_", "-")
        point = {name: module if kind == "hooks" else f"{module}:Driver"}
        group = "modulm" if kind == "hooks" else f"modulm.{kind}"
        self._install(distribution, {group: point}, {module: source})
        return distribution

    def _replace(
        self, target: Any, method: str, misbehave: Callable[[Any], Callable[..., Any]], after: int
    ) -> None:
        """Replace a method. Static and class methods keep their kind."""
        stored = getattr_static(target, method) if isinstance(target, type) else None
        wrapper: Any = type(stored) if isinstance(stored, classmethod | staticmethod) else None
        original = getattr(stored, "__func__", None) or getattr(target, method)
        wrong = misbehave(original)
        seen = 0

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen <= after:
                return original(*arguments, **named)
            self.calls[method] = self.calls.get(method, 0) + 1
            return wrong(*arguments, **named)

        self._monkeypatch.setattr(target, method, call if wrapper is None else wrapper(call))

    def end(self) -> None:
        """Let methods that hang go on."""
        self._over.set()
