"""A driver under test among the installed plugins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from modulm.contracts.model import Model
from modulm.plugins import manager

__all__ = ["architecture_of", "offering"]


def architecture_of(driver: type[Model]) -> str:
    """Return the first architecture of the driver's `tiny()`."""
    architectures = driver.tiny().get("architectures")
    assert architectures, "tiny() has no architectures"
    name: str = architectures[0]
    return name


@contextmanager
def offering(driver: type[Model]) -> Iterator[None]:
    """Let the driver take precedence over every other one of its architecture.

    What this process has read of the installed plugins is used, as reading takes a while.
    """
    plugins, name = manager.current(), architecture_of(driver)
    before = [
        declared
        for declared in plugins.names("models")
        if declared.name == name and declared.source == "registered"
    ]
    if before:
        plugins.unregister("models", name)
    plugins.register("models", name, driver)
    try:
        yield
    finally:
        plugins.unregister("models", name)
        for declared in before:
            plugins.register("models", name, declared.driver or declared.target)
