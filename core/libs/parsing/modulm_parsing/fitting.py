"""Match parsers with a checkpoint by declarations of their packages, without importing them.

A parser package has a file `fits.toml` next to its `__init__.py`, with a table for each parser that
may be chosen automatically: `[tool_parsers.NAME]` and `[reasoning_parsers.NAME]`, with the fields
of `Fit`.
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
    """Evidence that a parser is right for a checkpoint.

    marks: texts that the chat template must all contain. any: texts of which it must contain one,
    unless the model is one of `models`. without: texts that it must not contain. models: model
    types or architectures; sufficient without a template. shared: other formats have the same
    marks, so one of `any` or `models` is needed. tokens: added tokens that together suffice if the
    template takes tools without writing the format. settings: keys of tokenizer_config.json of
    which one suffices; checked first. alone: reads whole messages, so the tool and the reasoning
    parser must have one name.
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
    """How well a parser fits; the greatest match is the most specific.

    level: 3 for the checkpoint's own description, 2 for its template, 1 for model and tokens.
    dialect: specific to this model among parsers with the same marks. marks, hits: counts.
    """

    level: int
    dialect: bool
    marks: int
    hits: int
    reason: str

    @property
    def rank(self) -> tuple[int, bool, int, int]:
        """The sort key."""
        return self.level, self.dialect, self.marks, self.hits


@frozen
class Offer:
    """A parser and its declaration."""

    declaration: Declaration
    fit: Fit

    @property
    def name(self) -> str:
        return self.declaration.name

    @property
    def foreign(self) -> bool:
        """Whether it belongs to a third-party package, which was installed on purpose."""
        return not is_first_party(self.declaration.distribution)


def offers_of(plugins: PluginManager) -> Mapping[str, tuple[Offer, ...]]:
    """Return kind -> usable parsers that declare what they fit, by name."""
    offers_by_kind: dict[str, list[Offer]] = {kind: [] for kind in _KINDS}
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
        offers_by_kind[declaration.kind].append(Offer(declaration, fit))
    return {kind: tuple(offers) for kind, offers in offers_by_kind.items()}


def _fit(table: Mapping[str, Any]) -> Fit:
    """Parse a table of the file. Raises ValueError that names the key."""
    fields: dict[str, Any] = {}
    for key, value in table.items():
        if key in ("shared", "alone"):
            valid = isinstance(value, bool)
        else:
            valid = isinstance(value, list) and all(isinstance(v, str) and v for v in value)
        if not valid or key not in _FIELDS:
            raise ValueError(f"{key}: unknown key or wrong type")
        fields[key] = tuple(value) if isinstance(value, list) else value
    return Fit(**fields)


def _package(declaration: Declaration) -> str:
    return declaration.target.partition(":")[0].partition(".")[0]


def _read(package: str) -> Mapping[str, Mapping[str, Any]]:
    """Read the declarations of a package without importing it; empty without a file."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return {}
    locations = spec.submodule_search_locations if spec is not None else None
    for location in locations or ():
        file = join(location, _FILE)
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
    """Return how well a parser fits, or why it does not."""
    described = [key for key in fit.settings if isinstance(evidence.settings.get(key), Mapping)]
    if described:
        return Match(
            3, True, len(described), 0, f"the checkpoint describes its messages: {described[0]}"
        )
    template = evidence.template(kind)
    models = sorted(evidence.models.intersection(fit.models))
    if template:
        written = _written(fit, template, models)
        if isinstance(written, Match):
            return written
        if not (kind == "tool_parsers" and "tools" in template and _has_tokens(fit, evidence)):
            return written
    elif models:
        return Match(1, False, 0, len(models), f"no chat template; model {models[0]}")
    if _has_tokens(fit, evidence):
        return Match(1, False, 0, 0, f"the vocabulary has {' '.join(fit.tokens)}")
    return "no evidence for it"


def _has_tokens(fit: Fit, evidence: Evidence) -> bool:
    return bool(fit.tokens) and evidence.tokens.issuperset(fit.tokens)


def _written(fit: Fit, template: str, models: list[str]) -> Match | str:
    """Evaluate the template."""
    if not fit.marks and not fit.any:
        return "no evidence for it"
    marks = [mark for mark in fit.marks if mark in template]
    if len(marks) < len(fit.marks):
        missing = next(mark for mark in fit.marks if mark not in template)
        return f"the chat template does not write {missing}" if marks else "no evidence for it"
    hits = [word for word in fit.any if word in template]
    if (fit.any or fit.shared) and not hits and not models:
        needed = [*fit.any, *fit.models]
        return f"neither template nor model has {' or '.join(needed)}" if marks else (
            "no evidence for it"
        )  # fmt: skip
    unwanted = next(_in(fit.without, template), None)
    if unwanted is not None:
        return f"the chat template writes {unwanted}"
    evidence_texts = [*marks, *hits]
    reason = f"the chat template writes {' '.join(evidence_texts)}" + "".join(
        f", {name}" for name in models
    )
    return Match(2, fit.shared, len(marks), len(hits) + len(models), reason)


def _in(candidates: tuple[str, ...], text: str) -> Iterator[str]:
    return (word for word in candidates if word in text)
