"""Build a wheel of every distribution into a folder:

    wheels.py [FOLDER] [--kernels all|built|aarch64|none] [--extras cpu,ray-serve]

Also writes `modulm.txt`, this project's wheels that the extras need, with hashes; `third-party.txt`
and `constraints.txt`, their other requirements and the tested versions; `locks`, hashes of these if
all are locked, as those of the extras `cpu` and `cuda` are (tools/lock.py); and `sbom.cdx.json`,
all of them as a CycloneDX document.
Installing in two steps (`commands`) ensures that no other package replaces one of these.

Pure packages build in parallel, in a few hundredths of a second each. The wheel of the kernels
contains all levels and takes minutes to build; `built` packs those that setup has compiled for this
machine instead, `aarch64` compiles those for Arm with Debian's cross compiler (apt-get install
g++-aarch64-linux-gnu), and `none` omits that package, which GPUs do not need.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
UV = str(Path(sys.executable).with_name("uv"))
COMPILED = ROOT / "kernels/cpu"
LOCKS = ROOT / "tools/locks"
#: Name of the distribution there.
KERNELS = "modulm-kernels-cpu"
#: The part of a marker that names an extra; build backends write it last.
_EXTRA = r"(?: and )?extra == ['\"]([^'\"]+)['\"]"


def folders() -> list[Path]:
    """Return the folders of all distributions that are not compiled."""
    files = [ROOT / "pyproject.toml"]
    for pattern in ("core/*/*", "kernels/*", "plugins/*/*"):
        files += sorted(ROOT.glob(f"{pattern}/pyproject.toml"))
    return [path.parent for path in files if path.parent != COMPILED]


def build(folder: Path, out: Path, *options: str, **environment: str) -> None:
    """Build one wheel. Raises SystemExit with the output of a failed build."""
    command = [UV, "build", "--wheel", "--quiet", "--no-create-gitignore", "--out-dir", str(out)]
    done = subprocess.run(
        [*command, *options, str(folder)], capture_output=True, text=True, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"wheels: {folder.relative_to(ROOT)}: {done.stderr or done.stdout}")


def build_kernels(out: Path) -> None:
    """Compile the kernels of all levels for this CPU architecture."""
    build(COMPILED, out, "-C", "cmake.define.MODULM_LEVELS=all")


def cross_compile_kernels(out: Path) -> None:
    """Compile the kernels of all levels for Arm, on any machine."""
    if shutil.which("aarch64-linux-gnu-g++") is None:
        raise SystemExit("wheels: no cross compiler; apt-get install g++-aarch64-linux-gnu")
    toolchain = COMPILED / "cmake/aarch64.cmake"
    build(
        COMPILED, out, "-C", "cmake.define.MODULM_LEVELS=all", "-C",
        f"cmake.args=-DCMAKE_TOOLCHAIN_FILE={toolchain}", "-C", "build-dir=build/aarch64",
        _PYTHON_HOST_PLATFORM="linux-aarch64",
    )  # fmt: skip


def pack_kernels(out: Path) -> None:
    """Pack the kernels of this environment without compiling."""
    libraries = list(Path(sysconfig.get_path("platlib"), "modulm_kernels_cpu").glob("lib*.so"))
    if not libraries:
        raise SystemExit("wheels: no kernels are built in this environment; make setup builds them")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "kernels")
        shutil.copytree(COMPILED, folder, ignore=shutil.ignore_patterns("build", "__pycache__"))
        for path in libraries:
            shutil.copy(path, folder / "modulm_kernels_cpu")
        done = ("-C", "wheel.cmake=false", "-C", "wheel.platlib=true")
        build(folder, out, *done, "-C", "build-dir=")


#: How `--kernels` makes the wheel of kernels.
_KERNELS = {"all": build_kernels, "built": pack_kernels, "aarch64": cross_compile_kernels}


def build_all(out: Path, kernels: str) -> list[Path]:
    """Build all wheels into a folder, replacing others of this project; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("modulm*.whl"):
        old.unlink()
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(build, folder, out) for folder in folders()]
        if kernels != "none":
            jobs.append(pool.submit(_KERNELS[kernels], out))
        for job in jobs:
            job.result()
    return sorted(out.glob("modulm*.whl"))


def commands(folder: Path) -> tuple[str, str]:
    """Return the commands that install a folder's wheels: other packages first, then only these."""
    own = f"--no-index --no-deps --require-hashes --find-links {folder}"
    others = f"--constraint {folder}/constraints.txt -r {folder}/third-party.txt"
    if (folder / "locks").is_dir():
        locks = folder / "locks"
        others = f"--no-deps --require-hashes -r {locks}/torch.txt -r {locks}/third-party.txt"
    return (
        f"pip install {others}",
        f"pip install {own} -r {folder}/modulm.txt",
    )


def requirements(wheel: Path) -> list[Requirement]:
    """Return the requirements in a wheel's metadata."""
    with ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(name).decode())
    return [Requirement(line) for line in headers.get_all("Requires-Dist", ())]


def needed(
    wheels: list[Path], extras: list[str], omitted: str = ""
) -> tuple[list[Path], list[str]]:
    """Return the wheels that `modulm` with these extras needs, and others' requirements.

    omitted: an own distribution to leave out. Raises SystemExit if an own distribution is missing,
    or for an unknown extra.
    """
    own = {canonicalize_name(wheel.name.split("-")[0]): wheel for wheel in wheels}
    todo = [Requirement(f"modulm[{','.join(extras)}]")]
    done: set[tuple[str, str]] = set()
    others: set[str] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name == omitted:
            continue
        if name not in own:
            if re.match(r"modulm\b", name):
                raise SystemExit(f"wheels: there is no wheel of {name}")
            marker = re.sub(_EXTRA, "", str(requirement.marker or ""))
            requirement.marker = Marker(marker) if marker else None
            others.add(str(requirement))
            continue
        found = requirements(own[name])
        for extra in ("", *requirement.extras):
            if (name, extra) not in done:
                done.add((name, extra))
                todo += [one for one in found if _applies(one, extra)]
    return sorted(own[name] for name in {name for name, _ in done}), sorted(others)


def _applies(requirement: Requirement, extra: str) -> bool:
    """Whether a requirement belongs to an extra ("": to none), wherever it is installed."""
    asked = re.search(_EXTRA, str(requirement.marker or ""))
    return (asked.group(1) if asked else "") == extra


def locked() -> set[str]:
    """Return the names of packages with hashes in `tools/locks`."""
    texts = [path.read_text() for path in LOCKS.iterdir()]
    names = (re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==", text, re.M) for text in texts)
    return {canonicalize_name(name) for found in names for name in found}


def write_requirements(
    folder: Path, wheels: list[Path], extras: list[str], omitted: str = ""
) -> None:
    """Write `modulm.txt`, `third-party.txt` and `sbom.cdx.json`."""
    own, others = needed(wheels, extras, omitted)
    parts = []
    lines = []
    for wheel in own:
        name, version = canonicalize_name(wheel.name.split("-")[0]), wheel.name.split("-")[1]
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{name}=={version} --hash=sha256:{digest}")
        hashes = [{"alg": "SHA-256", "content": digest}]
        parts.append({"type": "library", "name": name, "version": version,
                      "purl": f"pkg:pypi/{name}@{version}", "hashes": hashes})  # fmt: skip
    (folder / "modulm.txt").write_text("\n".join(lines) + "\n")
    shutil.copy(ROOT / "constraints.txt", folder)
    shutil.rmtree(folder / "locks", ignore_errors=True)
    if {canonicalize_name(Requirement(line).name) for line in others} <= locked():
        shutil.copytree(LOCKS, folder / "locks")
    (folder / "third-party.txt").write_text("\n".join(others) + "\n")
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    for name in sorted({canonicalize_name(Requirement(line).name) for line in others}):
        version = {"version": pins[name]} if name in pins else {}
        purl = f"pkg:pypi/{name}" + (f"@{pins[name]}" if name in pins else "")
        parts.append({"type": "library", "name": name, **version, "purl": purl})
    document = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": parts}
    (folder / "sbom.cdx.json").write_text(json.dumps(document, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Build the wheels and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--kernels", choices=(*_KERNELS, "none"), default="all")
    parser.add_argument("--extras", default="cpu", help="of the requirement files, with commas")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    wheels = build_all(options.folder.resolve(), options.kernels)
    omitted = KERNELS if options.kernels == "none" else ""
    write_requirements(options.folder.resolve(), wheels, options.extras.split(","), omitted)
    size = sum(path.stat().st_size for path in wheels) / 1e6
    seconds = time.monotonic() - started
    print(f"wheels: {len(wheels)} in {options.folder}, {size:.1f} MB, {seconds:.0f} s")
    for command in commands(options.folder):
        print(f"wheels: {command}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
