"""Which parsers fit a checkpoint, by what their packages declare. No parser is imported for it.

A package of parsers has a file `fits.toml` beside its `__init__.py`, with a table for each parser
that may be chosen: `[tool_parsers.NAME]` and `[reasoning_parsers.NAME]`, of the fields of `Fit`.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from os.path import join
from typing import TYPE_CHECKING, Any

from attrs import fields, frozen

from modulm.plugins.index import is_first_party

if TYPE_CHECKING:
    from modulm.plugins.declaration import Declaration
    from modulm.plugins.manager import PluginManager
    from modulm_parsing.evidence import Evidence

__all__ = ["Fit", "Match", "Offer", "match", "offers_of"]

log = logging.getLogger("modulm.parsing")

_KINDS = ("tool_parsers", "reasoning_parsers")
_FILE = "fits.toml"


@frozen
class Fit:
    """What tells that a parser is for a checkpoint.

    marks: texts that the chat template must all hold. any: texts of which it must hold one, unless
    the model is one of `models`. without: texts that it must not hold. models: model types or
    architectures; where there is no template they are enough. shared: others have the same marks,
    so that one of `any` or `models` is needed. tokens: added tokens that are all enough where
    the template does not write the format, but takes tools. settings: keys of
    tokenizer_config.json of which one is enough, before all else. alone: it reads whole messages,
    so that the tool and the reasoning parser have one name.
    """

    marks: tuple[str, ...] = ()
    any: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    shared: bool = False
    tokens: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    alone: bool = False


_FIELDS = frozenset(field.name for field in fields(Fit))


@frozen
class Match:
    """How well a parser fits; the greatest one is the most specific.

    level: 3 for the checkpoint's own description, 2 for its template, 1 for model and tokens.
    dialect: it is for this very model among those with the same marks. marks, hits: how many.
    """

    level: int
    dialect: bool
    marks: int
    hits: int
    reason: str

    @property
    def rank(self) -> tuple[int, bool, int, int]:
        """What is compared."""
        return self.level, self.dialect, self.marks, self.hits


@frozen
class Offer:
    """A parser and what it declares."""

    declaration: Declaration
    fit: Fit

    @property
    def name(self) -> str:
        return self.declaration.name

    @property
    def foreign(self) -> bool:
        """Whether it comes with a package of somebody else's, who installed it for a reason."""
        return not is_first_party(self.declaration.distribution)


def offers_of(plugins: PluginManager) -> Mapping[str, tuple[Offer, ...]]:
    """Kind -> the parsers that may be used and say what they are for, by name."""
    found: dict[str, list[Offer]] = {kind: [] for kind in _KINDS}
    declared = [d for kind in _KINDS for d in plugins.names(kind)]
    tables = {package: _read(package) for package in {_package(d) for d in declared}}
    for declaration in declared:
        table = tables[_package(declaration)].get(declaration.kind, {}).get(declaration.name)
        if table is None:
            continue
        try:
            fit = _fit(table)
        except ValueError as error:
            log.warning("%s: %s: %s", declaration, _FILE, error)
            continue
        found[declaration.kind].append(Offer(declaration, fit))
    return {kind: tuple(offers) for kind, offers in found.items()}


def _fit(table: Mapping[str, Any]) -> Fit:
    """A table as it stands in the file. Raises ValueError that names the key."""
    given: dict[str, Any] = {}
    for key, value in table.items():
        if key in ("shared", "alone"):
            right = isinstance(value, bool)
        else:
            right = isinstance(value, list) and all(isinstance(v, str) and v for v in value)
        if not right or key not in _FIELDS:
            raise ValueError(f"{key}: no key of a declaration, or not of its type")
        given[key] = tuple(value) if isinstance(value, list) else value
    return Fit(**given)


def _package(declaration: Declaration) -> str:
    return declaration.target.partition(":")[0].partition(".")[0]


def _read(package: str) -> Mapping[str, Mapping[str, Any]]:
    """The declarations of a package, which is found and not imported; none if it has no file."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return {}
    places = spec.submodule_search_locations if spec is not None else None
    for place in places or ():
        file = join(place, _FILE)
        try:
            data: Any = spec.loader.get_data(file)  # type: ignore[union-attr]
            table = tomllib.loads(data.decode())
        except OSError:
            continue
        except ValueError as error:
            log.warning("%s: %s", file, error)
            continue
        return {kind: value for kind, value in table.items() if isinstance(value, dict)}
    return {}


def match(fit: Fit, kind: str, evidence: Evidence) -> Match | str:
    """How well a parser fits, or why it does not."""
    own = [key for key in fit.settings if isinstance(evidence.settings.get(key), Mapping)]
    if own:
        return Match(3, True, len(own), 0, f"the checkpoint describes its messages: {own[0]}")
    template = evidence.template(kind)
    named = sorted(evidence.models.intersection(fit.models))
    if template:
        written = _written(fit, template, named)
        if isinstance(written, Match):
            return written
        if not (kind == "tool_parsers" and "tools" in template and _has_tokens(fit, evidence)):
            return written
    elif named:
        return Match(1, False, 0, len(named), f"there is no template; model {named[0]}")
    if _has_tokens(fit, evidence):
        return Match(1, False, 0, 0, f"the vocabulary has {' '.join(fit.tokens)}")
    return "nothing tells of it"


def _has_tokens(fit: Fit, evidence: Evidence) -> bool:
    return bool(fit.tokens) and evidence.tokens.issuperset(fit.tokens)


def _written(fit: Fit, template: str, named: list[str]) -> Match | str:
    """What the template says."""
    if not fit.marks and not fit.any:
        return "nothing tells of it"
    held = [mark for mark in fit.marks if mark in template]
    if len(held) < len(fit.marks):
        missing = next(mark for mark in fit.marks if mark not in template)
        return f"the chat template does not write {missing}" if held else "nothing tells of it"
    hits = [word for word in fit.any if word in template]
    if (fit.any or fit.shared) and not hits and not named:
        needed = [*fit.any, *fit.models]
        return f"neither template nor model says {' or '.join(needed)}" if held else (
            "nothing tells of it"
        )  # fmt: skip
    unwanted = next(_in(fit.without, template), None)
    if unwanted is not None:
        return f"the chat template writes {unwanted}"
    words = [*held, *hits]
    reason = f"the chat template writes {' '.join(words)}" + "".join(f", {name}" for name in named)
    return Match(2, fit.shared, len(held), len(hits) + len(named), reason)


def _in(words: tuple[str, ...], text: str) -> Iterator[str]:
    return (word for word in words if word in text)
