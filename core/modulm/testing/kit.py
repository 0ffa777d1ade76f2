"""Entry point to the contract kits: check that a driver satisfies the contract of its kind.

    from modulm.testing import kit

    def test_contract():
        kit.check("attention", MyBackend)

Pass the class itself. `KITS` names the kit of each kind; it can also be called directly, for
example as `modulm.testing.platform.check_platform(MyPlatform)`, where it accepts more arguments. A
kit raises AssertionError with what was expected. For kinds without a kit, `check` verifies what
every driver must have: the contract's class, no abstract methods, a contract version.

`modulm plugins doctor` runs the same kits over everything that is installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from modulm.plugins.declaration import Declaration
from modulm.plugins.kinds import find_kind
from modulm.plugins.manager import check_driver

__all__ = ["KITS", "check", "has_kit"]

#: Kind -> function that checks a driver.
KITS: Mapping[str, str] = MappingProxyType(
    {
        "models": "modulm.testing.models:check_model",
        "attention": "modulm.testing.attention:check_attention",
        "quantization": "modulm.testing.quantization:check_quantization",
        "adapters": "modulm.testing.adapters:check_bank",
        "platforms": "modulm.testing.platform:check_platform",
        "tool_parsers": "modulm_parsing.testing:check_parser",
        "reasoning_parsers": "modulm_parsing.testing:check_parser",
    }
)


def has_kit(kind: str) -> bool:
    """Whether drivers of the kind have a contract."""
    return find_kind(kind).contract is not None


def check(kind: str, driver: type, **more: Any) -> None:
    """Run the kit of `kind` on a driver class; `more` are arguments of the kit (models: `oracle=`).

    Raises AssertionError for a broken contract, PluginIncompatible for a wrong contract version,
    PluginBroken for something that is not a driver of the kind.
    """
    target = f"{driver.__module__}:{driver.__qualname__}"
    declaration = Declaration(driver.__name__, target, kind=kind)
    check_driver(declaration, driver, find_kind(kind))
    missing = sorted(getattr(driver, "__abstractmethods__", ()))
    assert not inspect.isabstract(driver), f"{target} does not implement {', '.join(missing)}"
    if kind in KITS:
        module, _, function = KITS[kind].partition(":")
        getattr(import_module(module), function)(driver, **more)
