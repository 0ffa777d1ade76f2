"""Fetch JavaScript libraries from npm into the packages that serve them, exactly as recorded.

tools/vendored.toml records the package, version, npm's integrity hash of the archive, and the
SHA-256 of each file. `vendor.py` fetches them with `npm pack`, `vendor.py check` compares the
repository with the record (offline), `vendor.py record NAME VERSION` fetches another version and
records it.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tools/vendored.toml"
HEAD = """\
# JavaScript that pages of the server load, as it was published on npm. Written by tools/vendor.py.
# integrity: of the archive, as npm states it; files: name here = [name in the archive, SHA-256].
"""


def packages() -> list[dict[str, Any]]:
    """Return the record."""
    record: list[dict[str, Any]] = tomllib.loads(RECORD.read_text())["package"]
    return record


def archive(package: dict[str, Any], folder: Path) -> tuple[dict[str, bytes], str]:
    """Return (files of the published archive by name, its integrity hash)."""
    spec = f"{package['name']}@{package['version']}"
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), spec]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (packed,) = folder.glob("*.tgz")
    digest = base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode()
    with tarfile.open(packed) as tar:
        members = [member for member in tar.getmembers() if member.isfile()]
        files = {m.name.partition("/")[2]: tar.extractfile(m).read() for m in members}  # type: ignore[union-attr]
    packed.unlink()
    return files, f"sha512-{digest}"


def differences() -> Iterator[str]:
    """Yield a message for each file that differs from the record."""
    for package in packages():
        folder = ROOT / package["into"]
        for name, (_, digest) in package["files"].items():
            path = folder / name
            if not path.is_file():
                yield f"{package['into']}/{name} is missing"
            elif hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                yield f"{package['into']}/{name} is not {package['name']} {package['version']}"
        present = {
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        }
        for name in sorted(present - set(package["files"])):
            yield f"{package['into']}/{name} is not in tools/vendored.toml"


def fetch(package: dict[str, Any], *, record: bool = False) -> None:
    """Write a package's files. Raises SystemExit if they differ from the record."""
    with tempfile.TemporaryDirectory() as folder:
        files, integrity = archive(package, Path(folder))
    if record:
        package["integrity"] = integrity
    elif integrity != package["integrity"]:
        raise SystemExit(f"{package['name']} {package['version']} is not what was recorded")
    for name, (origin, digest) in package["files"].items():
        actual = hashlib.sha256(files[origin]).hexdigest()
        if record:
            package["files"][name] = [origin, actual]
        elif actual != digest:
            raise SystemExit(f"{origin} of {package['name']} is not what was recorded")
        path = ROOT / package["into"] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[origin])


def write(record: list[dict[str, Any]]) -> None:
    """Write the record."""
    lines = [HEAD]
    for package in record:
        lines.append("[[package]]\n")
        lines += [f'{key} = "{value}"\n' for key, value in package.items() if key != "files"]
        lines.append("[package.files]\n")
        files = package["files"].items()
        lines += [f'"{name}" = ["{origin}", "{digest}"]\n' for name, (origin, digest) in files]
        lines.append("\n")
    RECORD.write_text("".join(lines).rstrip("\n") + "\n")


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    match arguments:
        case []:
            for package in packages():
                fetch(package)
        case ["check"]:
            problems = list(differences())
            print(*problems, sep="\n", end="\n" if problems else "")
            return 1 if problems else 0
        case ["record", name, version]:
            known = packages()
            (package,) = [each for each in known if each["name"] == name]
            package["version"] = version
            fetch(package, record=True)
            write(known)
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
