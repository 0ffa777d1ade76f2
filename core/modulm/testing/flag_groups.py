"""The contract kit for groups of flags.

from modulm.testing.flag_groups import check_flag_group

def test_contract():
    check_flag_group(MyFlags)
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import attrs

from modulm.config.schema.catalog import catalog
from modulm.contracts.flags import Flag, FlagGroup, flags_of, read
from modulm.errors import ConfigError

__all__ = ["check_flag_group"]

#: Modules that take too long to import for a command that only reads flags.
_HEAVY = frozenset({"jax", "numpy", "torch", "transformers"})


def check_flag_group(driver: type[FlagGroup]) -> None:
    """Run the kit: titles, names, help, defaults, and values as they are written.

    Raises AssertionError with what was expected.
    """
    group = isinstance(driver, type) and issubclass(driver, FlagGroup)
    assert group, f"{driver!r} is no FlagGroup"
    decorated = "__attrs_attrs__" in vars(driver)
    assert decorated, f"{driver.__name__} is not decorated with @flag_group"
    assert driver.title.strip(), f"{driver.__name__} has no title, the heading in --help"
    loaded = vars(sys.modules[driver.__module__]).values()
    imported = {each.__name__ for each in loaded if isinstance(each, ModuleType)}
    heavy = ", ".join(sorted(name for name in imported if name.partition(".")[0] in _HEAVY))
    assert not heavy, f"{driver.__module__} imports {heavy}, and every command reads flags"
    flags = flags_of(driver)
    assert flags, f"{driver.__name__} has no flags"
    try:
        values = driver()
    except ConfigError as error:
        raise AssertionError(f"a default is not a value of its flag: {error}") from error
    for spec in flags:
        _check_flag(spec)
        _check_names(spec, driver)
        _check_default(spec, getattr(values, spec.name))


def _check_flag(spec: Flag) -> None:
    sentence = spec.help.strip()
    assert sentence, f"{spec.option} has no help"
    ended = sentence.endswith((".", ")", "`"))
    assert ended, f"{spec.option}: its help is no sentence, which ends with a full stop"
    chosen = spec.default is None or not spec.choices or spec.is_list or spec.kind is not None
    allowed = chosen or spec.default in spec.choices
    assert allowed, f"{spec.option}: the default {spec.default!r} is not one of {spec.choices}"
    bounds = spec.least is None or spec.most is None or spec.least <= spec.most
    assert bounds, f"{spec.option}: least {spec.least} is above most {spec.most}"


def _check_names(spec: Flag, driver: type[FlagGroup]) -> None:
    """Check that no other group has the flag or an alias of it."""
    for group in catalog().groups:
        if group.cls.__qualname__ == driver.__qualname__:
            continue
        for other in group.flags:
            names = {other.name, *other.aliases} & {spec.name, *spec.aliases}
            taken = ", ".join(sorted(names))
            assert not names, f"{spec.option}: {group.cls.__name__} already has {taken}"


def _check_default(spec: Flag, default: Any) -> None:
    """Check that the default, written in a YAML file or a variable, is read as itself."""
    if default is None or spec.parse is not None or spec.is_table:
        return
    again = attrs.evolve(spec, default=object())
    for written in (default,) if spec.is_list else (default, str(default)):
        value = read(again, written)
        assert value == default, f"{spec.option}: {written!r} is read as {value!r}"
