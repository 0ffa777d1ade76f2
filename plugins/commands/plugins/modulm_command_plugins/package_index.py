"""Indexes of plugin packages: JSON files that say what there is, for which contracts, with digests.

    {"version": 1, "packages": [{"name": "modulm-parser-foo", "version": "1.0.0",
      "summary": "Foo's tool calls", "provides": ["tool_parsers/foo"],
      "contracts": {"tool_parsers": [1, 2]}, "quality": "listed",
      "url": "modulm_parser_foo-1.0.0-py3-none-any.whl", "sha256": "..."}]}

`url` is absolute or relative to the index. An entry without one is installed by its name.
`provenance` is the URL of a wheel's attestations (PEP 740), and `publisher` says who must have
signed one: {"kind": "GitHub", "repository": "me/foo", "workflow": "publish.yml"}. An index with
`"requires_attestations": true` refuses wheels without. The index of this project's packages is in
this package (`tests/meta/test_index.py` writes it).
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from email import message_from_string
from importlib.resources import files
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urljoin, urlsplit
from urllib.request import urlopen

from attrs import asdict, evolve, field, frozen
from packaging.version import InvalidVersion, Version

import modulm
from modulm.errors import ConfigError
from modulm.plugins.index import is_first_party, normalized
from modulm.plugins.kinds import kind_of
from modulm.structure import Problem, structure_table
from modulm_command_plugins.static_api import contract_version

__all__ = ["Entry", "PackageIndex", "describe_wheels", "fetch", "first_party", "read_index"]

FORMAT = 1
#: Levels of quality, best first: of this project; its contract kits pass in its publisher's tests;
#: only listed.
QUALITIES = ("first-party", "tested", "listed")
#: Maximum size of an index or provenance, and of a wheel, in bytes; seconds without an answer.
_INDEX_BYTES, _WHEEL_BYTES, _TIMEOUT = 16 << 20, 1 << 30, 30.0
_HASH = re.compile(r"[0-9a-f]{64}")


@frozen
class Entry:
    """One release of a package.

    provides: "kind/name". contracts: kind -> lowest and highest version of its contract.
    url: of the wheel; then sha256 is its digest. version: "" stands for this modulm's.
    provenance: URL of the wheel's attestations. publisher: who must have signed one of them.
    """

    name: str
    version: str = ""
    summary: str = ""
    provides: tuple[str, ...] = ()
    contracts: Mapping[str, tuple[int, int]] = field(factory=dict)
    quality: str = "listed"
    url: str = ""
    sha256: str = ""
    provenance: str = ""
    publisher: Mapping[str, str] = field(factory=dict)

    def problem(self) -> str:
        """Describe what is wrong with the entry, or return ""."""
        if self.quality == QUALITIES[0] and not is_first_party(self.name):
            return f"only packages of modulm are {self.quality}"
        if self.quality not in QUALITIES:
            return f"quality {self.quality!r} is none of {', '.join(QUALITIES)}"
        if self.url and not _HASH.fullmatch(self.sha256):
            return "an entry with a url needs the sha256 of its wheel, 64 hexadecimal digits"
        if bool(self.provenance) is not bool(self.publisher):
            return "provenance and publisher belong together: whose attestations count"
        if self.provenance and not self.url:
            return "an entry with a provenance needs the url of the wheel that it is of"
        try:
            Version(self.version)
        except InvalidVersion:
            return f"{self.version!r} is no version"
        return ""

    def misfits(self) -> list[str]:
        """Describe the contracts that this modulm has in another version."""
        wrong = []
        for kind, (lowest, highest) in self.contracts.items():
            version = contract_version(kind)
            if version is not None and not lowest <= version <= highest:
                span = f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
                wrong.append(f"{kind} {span}, not {version}")
        return wrong


@frozen
class PackageIndex:
    """The entries of one index.

    source: where it was read from. requires_attestations: wheels without one are refused.
    """

    version: int
    packages: tuple[Entry, ...]
    source: str = ""
    requires_attestations: bool = False

    def releases(self, name: str) -> list[Entry]:
        """Return the releases of a package, newest first."""
        same = (entry for entry in self.packages if normalized(entry.name) == normalized(name))
        return sorted(same, key=lambda entry: Version(entry.version), reverse=True)

    def text(self) -> str:
        """Format the index as JSON."""
        entries = [
            {key: value for key, value in asdict(entry).items() if value or key == "name"}
            for entry in self.packages
        ]
        demands = {"requires_attestations": True} if self.requires_attestations else {}
        table = {"version": self.version, **demands, "packages": entries}
        return json.dumps(table, indent=1) + "\n"


def first_party() -> PackageIndex:
    """Return the index of this project's packages, which share modulm's version."""
    text = files(__package__).joinpath("first_party.json").read_text(encoding="utf-8")
    return _parsed(text, "modulm")


def read_index(source: str) -> PackageIndex:
    """Read an index from a path or an https URL. Raises ConfigError naming `index`."""
    if "://" in source:
        return _parsed(_download(source, _INDEX_BYTES).decode(errors="replace"), source)
    try:
        return _parsed(Path(source).read_text(encoding="utf-8"), str(Path(source).resolve()))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("index", f"cannot read {source}: {error}") from error


def _parsed(text: str, source: str) -> PackageIndex:
    try:
        table = json.loads(text)
        index = structure_table(table if isinstance(table, dict) else {}, PackageIndex)
    except (ValueError, Problem) as error:
        raise ConfigError("index", f"{source} is no index of packages: {error}") from error
    if index.version != FORMAT:
        raise ConfigError(
            "index", f"{source} has format {index.version}, this modulm reads {FORMAT}"
        )
    entries = [evolve(e, version=e.version or modulm.__version__) for e in index.packages]
    for entry in entries:
        if problem := entry.problem():
            raise ConfigError("index", f"{source}: {entry.name}: {problem}")
    return evolve(index, packages=tuple(entries), source=source)


def fetch(
    entry: Entry, index: PackageIndex, folder: Path, trust_root: Path | None = None
) -> tuple[Path, str]:
    """Return the path of an entry's wheel in `folder` and the type of its attestation, "" for none.

    trust_root: keys of another Sigstore than the public one. Raises ConfigError if the wheel cannot
    be read, has another digest than the index says, or lacks the attestation that it says.
    """
    label = f"{entry.name} {entry.version}"
    if index.requires_attestations and not entry.provenance:
        raise ConfigError(
            "index", f"{label} has no attestation, and {index.source} requires one of each wheel"
        )
    url, content = _read_relative(entry.url, index.source, _WHEEL_BYTES)
    path = folder / Path(urlsplit(url).path if "://" in url else url).name
    digest = hashlib.sha256(content).hexdigest()
    if digest != entry.sha256:
        raise ConfigError(
            "index", f"{url} has the SHA-256 {digest}, and {index.source} says {entry.sha256}"
        )
    attested = ""
    if entry.provenance:
        from modulm_command_plugins.attestations import check_attestation

        _, provenance = _read_relative(entry.provenance, index.source, _INDEX_BYTES)
        wheel = (path.name, digest)
        attested = check_attestation(label, wheel, provenance, entry.publisher, trust_root)
    path.write_bytes(content)
    return path, attested


def _read_relative(url: str, source: str, most: int) -> tuple[str, bytes]:
    """Return the whole URL or path of what is beside an index, and its content."""
    if "://" in source or "://" in url:
        whole = urljoin(source, url)
        return whole, _download(whole, most)
    whole = str(Path(source).parent / url)
    try:
        return whole, Path(whole).read_bytes()
    except OSError as error:
        raise ConfigError("index", f"cannot read {whole}: {error.strerror}") from error


def _download(url: str, most: int) -> bytes:
    """Read an https URL. Raises ConfigError, also beyond `most` bytes."""
    if urlsplit(url).scheme != "https":
        raise ConfigError("index", f"{url}: only https and paths are read")
    try:
        with urlopen(url, timeout=_TIMEOUT) as answer:  # noqa: S310 - https, as checked above
            if urlsplit(answer.geturl()).scheme != "https":
                raise ConfigError("index", f"{url} leads to {answer.geturl()}, which is not https")
            content: bytes = answer.read(most + 1)
    except (URLError, OSError) as error:
        raise ConfigError("index", f"cannot read {url}: {error}") from error
    if len(content) > most:
        raise ConfigError("index", f"{url} has more than {most >> 20} MiB")
    return content


def describe_wheels(
    wheels: Iterable[Path], publisher: Mapping[str, str] | None = None
) -> PackageIndex:
    """Describe wheels that are beside the index. Reads metadata and runs nothing of them.

    publisher: who signed the `WHEEL.publish.attestation` beside each wheel; `WHEEL.provenance` is
    written of it. Raises ConfigError for a file that is no wheel.
    """
    wheels = sorted(wheels)
    entries = tuple(_described(wheel) for wheel in wheels)
    if publisher is None:
        return PackageIndex(FORMAT, entries)
    folders = {wheel.name: wheel.parent for wheel in wheels}
    return PackageIndex(
        FORMAT, tuple(_attested(entry, folders[entry.url], publisher) for entry in entries)
    )


def _attested(entry: Entry, folder: Path, publisher: Mapping[str, str]) -> Entry:
    from modulm_command_plugins.attestations import make_provenance

    attestation = folder / f"{entry.url}.publish.attestation"
    if not attestation.exists():
        return entry
    provenance = make_provenance([attestation.read_bytes()], publisher)
    (folder / f"{entry.url}.provenance").write_bytes(provenance)
    return evolve(entry, provenance=f"{entry.url}.provenance", publisher=publisher)


def _described(wheel: Path) -> Entry:
    try:
        with zipfile.ZipFile(wheel) as archive:
            folder = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            metadata = message_from_string(archive.read(folder).decode())
            points = folder.replace("METADATA", "entry_points.txt")
            text = archive.read(points).decode() if points in archive.namelist() else ""
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise ConfigError("wheels", f"{wheel} is no wheel") from error
    provides = tuple(_provided(text))
    kinds = dict.fromkeys(name.partition("/")[0] for name in provides)
    contracts = {kind: (api, api) for kind in kinds if (api := contract_version(kind)) is not None}
    return Entry(
        name=str(metadata["Name"]),
        version=str(metadata["Version"]),
        summary=str(metadata["Summary"] or ""),
        provides=provides,
        contracts=contracts,
        url=wheel.name,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
    )


def _provided(entry_points: str) -> Iterator[str]:
    kind: str | None = None
    for line in map(str.strip, entry_points.splitlines()):
        if line.startswith("["):
            kind = kind_of(line.strip("[]"))
        elif kind is not None and "=" in line:
            yield f"{kind}/{line.partition('=')[0].strip()}"
