"""Which installed plugins may be used: the allow and deny list of `--plugins`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from attrs import frozen

from modulm.errors import ConfigError
from modulm.plugins.declaration import Declaration
from modulm.plugins.index import is_first_party, normalized
from modulm.plugins.records import altered_files, record_digest

__all__ = ["CORE", "FIRST_PARTY", "Selection", "check_terms", "offers_of"]

#: The core's distribution; allow lists never exclude it.
CORE = "modulm"
#: A term that stands for all packages of this project.
FIRST_PARTY = "first-party"


@frozen
class Selection:
    """An allow list ("a,b": only these), a deny list ("-c": all but this), or both ("a,-c").

    A term is a distribution ("modulm-foo" or "modulm-foo==1.2"), a driver's name, kind/name, or
    "first-party" for all packages of this project. "modulm-foo@sha256:" with the digest of its
    RECORD requires exactly these files. Without terms everything is allowed. Allow lists do not
    exclude commands and flags, which do nothing until they are used. "~modulm-foo" runs a package
    in a process of its own (`--isolate`); settings may follow after colons.
    """

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    isolate: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Parse a comma-separated list. Raises ConfigError for a term that is only a sign."""
        terms = [term.strip() for term in text.split(",") if term.strip()]
        if {"-", "~"} & {*terms}:
            raise ConfigError("plugins", "a '-' or '~' must be followed by a name")
        signed = {sign: tuple(t[1:] for t in terms if t[0] == sign) for sign in "-~"}
        return cls(tuple(term for term in terms if term[0] not in signed), *signed.values())

    def __str__(self) -> str:
        signed = [f"-{term}" for term in self.deny] + [f"~{term}" for term in self.isolate]
        return ",".join([*self.allow, *signed])

    def isolation(self, declaration: Declaration) -> str | None:
        """Return the term that isolates the plugin, with its settings, or None."""
        return next((t for t in self.isolate if _matches(t.partition(":")[0], declaration)), None)

    def permits(self, declaration: Declaration) -> bool:
        """Whether the plugin may be used."""
        if any(_matches(term, declaration) for term in self.deny):
            return False
        always = declaration.distribution == CORE or declaration.kind in ("commands", "flags")
        allowed = any(_matches(term, declaration) for term in self.allow)
        return not self.allow or always or allowed

    def names(self, declaration: Declaration) -> bool:
        """Whether the user named this plugin to be used, so that its failure is an error."""
        terms = (term for term in self.allow if term != FIRST_PARTY)
        named = any(_matches(term, declaration) for term in terms)
        return named or self.isolation(declaration) is not None


def offers_of(declarations: Sequence[Declaration]) -> dict[str, str]:
    """Return each name as messages suggest it: with the distributions of other projects."""
    origins: dict[str, list[str]] = {each.name: [] for each in declarations}
    for each in declarations:
        origins[each.name] += [] if is_first_party(each.distribution) else [each.origin]
    return {n: f"{n} ({' and '.join(by)})" if by else n for n, by in origins.items()}


def check_terms(terms: Iterable[str], known: Sequence[Declaration]) -> None:
    """Raise ConfigError, with close matches, for a term that matches no plugin."""
    for term in terms:
        if any(_matches(term, declaration) for declaration in known):
            continue
        name = _named(term)
        for declaration in known:
            if name != term and _matches(name, declaration):
                there = _installed(declaration)
                raise ConfigError(
                    "plugins", f"no installed plugin is called {term!r}; did you mean {there}?"
                )
        offers = {d.distribution: d.distribution for d in known} | offers_of(known)
        close = [offers[near] for near in get_close_matches(term, sorted(offers), n=3)]
        hint = f"did you mean {' or '.join(close)}?" if close else "see `modulm plugins list`"
        raise ConfigError("plugins", f"no installed plugin is called {term!r}; {hint}")


def _named(term: str) -> str:
    """Return a term without its version or digest."""
    return term.partition("@sha256:")[0].partition("==")[0]


def _installed(declaration: Declaration) -> str:
    """Describe the installed version or digest that differs from the pinned one."""
    name = declaration.distribution
    changed = ", ".join(altered_files(name)[:3])
    digest = record_digest(name)
    pinned = f"{name}=={declaration.version}" + (f"@sha256:{digest}" if digest else "")
    return pinned + (f" (changed since it was installed: {changed})" if changed else "")


def _matches(term: str, declaration: Declaration) -> bool:
    term, _, digest = term.partition("@sha256:")
    term, _, version = term.partition("==")
    if version not in ("", declaration.version):
        return False
    if digest and digest != record_digest(declaration.distribution):
        return False
    if digest and altered_files(declaration.distribution):
        return False
    return (
        term == declaration.name
        or term == f"{declaration.kind}/{declaration.name}"
        or normalized(term) == normalized(declaration.distribution)
        or (term == FIRST_PARTY and is_first_party(declaration.distribution))
    )
