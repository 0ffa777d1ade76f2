"""Set up .venv with everything a clone needs. Needs only Python; does nothing if it is up to date.

torch is installed first, with pip, which uses a CPU build if pip's configuration finds one. All
packages of this repository follow in one call of uv. A torch for GPUs includes Triton; for others
on Linux, Triton is installed from the index, to interpret kernels in tests. Meanwhile the compiled
kernels are built, for this CPU only; SKBUILD_CMAKE_DEFINE=MODULM_LEVELS=all builds all levels.
Settings: UV and pip's environment variables.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / "python"
STAMP = VENV / ".modulm-stamp"
KERNELS_STAMP = VENV / ".modulm-kernels-stamp"
SUPPORTED = ((3, 11), (3, 14))
TORCH_AT_LEAST = (2, 9)
TORCH = "torch==2.13.*"
UV = "uv>=0.9,<1"


def say(message: str) -> None:
    """Print a progress message."""
    print(f"setup: {message}", flush=True)


def packages() -> list[Path]:
    """Return the folders of pure Python distributions, the core first."""
    plugins = sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))
    libraries = sorted(path.parent for path in ROOT.glob("core/*/*/pyproject.toml"))
    return [ROOT, *libraries, *plugins, ROOT / "kernels/pallas", ROOT / "kernels/triton"]


def kernels() -> list[Path]:
    """Return the folders of compiled distributions."""
    return [path.parent for path in [ROOT / "kernels/cpu/pyproject.toml"] if path.exists()]


def inputs() -> Iterator[Path]:
    """Yield the files whose change requires a new installation."""
    yield ROOT / "constraints.txt"
    yield Path(__file__)
    for folder in packages():
        yield folder / "pyproject.toml"
    yield from kernel_inputs()


def kernel_inputs() -> Iterator[Path]:
    """Yield the files whose change requires the kernels to be compiled again."""
    for folder in kernels():
        for path in sorted(folder.rglob("*")):
            built = "build" in path.relative_to(folder).parts
            if path.suffix in {".toml", ".txt", ".cpp", ".h", ".hpp", ".cc"} and not built:
                yield path


def processor() -> list[str]:
    """Return what determines the CPU that kernels are built for."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    extensions = {flag for flag in flags if flag.startswith(("avx", "amx", "fma", "f16c", "bmi"))}
    return [*sorted(extensions), os.environ.get("SKBUILD_CMAKE_DEFINE", "")]


def fingerprint(paths: Iterable[Path]) -> str:
    """Return a hash that changes with the files, the interpreter, the compiler or the CPU."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {compiler()} {VENV} {processor()}".encode())
    for path in paths:
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compiler() -> str | None:
    """Return the path of the C++ compiler, or None."""
    names = [os.environ.get("CXX") or "c++", "g++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def run(*command: str | Path) -> bool:
    """Run a command and return whether it succeeded."""
    return subprocess.call([str(part) for part in command], cwd=ROOT) == 0


def ask(code: str) -> str:
    """Return what .venv's interpreter prints; "" if it fails."""
    done = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def installed(distribution: str) -> tuple[int, ...]:
    """Return the major and minor version of a distribution in .venv; empty if it is not
    installed.
    """
    version = ask(f"from importlib.metadata import version; print(version({distribution!r}))")
    return tuple(int(part) for part in version.split(".")[:2]) if version else ()


def make_venv() -> None:
    """Create .venv if it is missing or broken."""
    if PYTHON.exists() and ask("print(1)") == "1":
        return
    say(f"making .venv with Python {sys.version.split()[0]}")
    venv.create(VENV, with_pip=True, clear=True)


def get_torch() -> bool:
    """Keep a torch that is new enough, else install one with pip."""
    version = installed("torch")
    if version >= TORCH_AT_LEAST:
        say(f"keeping torch {'.'.join(map(str, version))}")
        return True
    say(f"installing {TORCH} (takes a while the first time)")
    # Compiling bytecode of all of torch takes longer than compiling what is imported.
    fast = ("--quiet", "--prefer-binary", "--no-compile")
    return run(PYTHON, "-m", "pip", "install", *fast, TORCH)


#: Endings of the final message that describe what is missing.
NO_COMPILER = (
    "without the CPU kernels: there is no C++ compiler (Debian: apt install g++; macOS: "
    "xcode-select --install), so plain torch computes, several times slower"
)
NOT_BUILT = (
    "WITHOUT THE CPU KERNELS: building them failed, so plain torch computes, several times slower; "
    "make clean, then again, shows why"
)


def get_uv() -> bool:
    """Install uv in .venv if needed."""
    return bool(installed("uv")) or run(PYTHON, "-m", "pip", "install", "--quiet", UV)


def install(*options: str | Path) -> list[str]:
    """Return the command that installs packages of this repository."""
    uv = [BIN / "uv", "pip", "install", "--quiet", "--python", PYTHON]
    return [str(part) for part in [*uv, "--constraints", "constraints.txt", *options]]


def editable(folders: list[Path]) -> list[str | Path]:
    """Return options that install `folders` as editable."""
    return [part for folder in folders for part in ("-e", folder)]


class Kernels:
    """The compiled packages, which are built in parallel to the rest, if they have changed."""

    def __init__(self) -> None:
        self._build: subprocess.Popen[bytes] | None = None
        self._current = fingerprint(kernel_inputs())
        self._built = KERNELS_STAMP.exists() and KERNELS_STAMP.read_text() == self._current
        if compiler() and kernels() and not self._built:
            say(f"compiling {len(kernels())} packages of kernels meanwhile")
            anew = [f"--reinstall-package=modulm-kernels-{folder.name}" for folder in kernels()]
            command = install("--no-deps", *anew, *editable(kernels()))
            self._build = subprocess.Popen(command, cwd=ROOT)

    def wait(self) -> str:
        """Wait for the build and return what is missing, "" if nothing."""
        if self._build is not None:
            if self._build.wait():
                return NOT_BUILT
            KERNELS_STAMP.write_text(self._current)
        return NO_COMPILER if kernels() and not compiler() else ""


def get_packages() -> bool:
    """Install everything that is not compiled, as editable, in one call."""
    say(f"installing {len(packages())} packages of this repository")
    groups = ["dev"] if ask("import triton; print(1)") else ["dev", "triton"]
    group_options = [part for group in groups for part in ("--group", group)]
    return run(*install(*group_options, *editable(packages())))


#: A finder of this repository's packages. Each editable installation adds a folder to `sys.path`,
#: and an import looks into 150 of them on average: a tenth of what starting `modulm` takes.
FINDER = """\
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from os.path import exists

PACKAGES = {packages!r}


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        folder = PACKAGES.get(name)
        if folder is None or not exists(file := folder + "/__init__.py"):
            return None
        spec = ModuleSpec(name, SourceFileLoader(name, file), origin=file, is_package=True)
        spec.submodule_search_locations.append(folder)
        spec.has_location = True
        return spec


sys.meta_path.insert(0, Finder)
"""


def write_finder() -> None:
    """Make .venv find each package of this repository in one step."""
    paths = {
        path.parent.name: str(path.parent)
        for folder in packages()
        for path in [*folder.glob("*/__init__.py"), *folder.glob("core/modulm/__init__.py")]
        if path.parent.name.startswith(("modulm", "pytest_modulm"))
    }
    target = Path(ask("import sysconfig; print(sysconfig.get_path('purelib'))"))
    (target / "_modulm_workspace.py").write_text(FINDER.format(packages=paths))
    (target / "_modulm_workspace.pth").write_text("import _modulm_workspace\n")


def main() -> int:
    """Bring .venv up to date. Returns 0 on success."""
    if not SUPPORTED[0] <= sys.version_info[:2] < SUPPORTED[1]:
        say(f"Python 3.11 to 3.13 is needed, this is {sys.version.split()[0]}")
        say("select another one: make PYTHON=python3.12 ...")
        return 1
    current = fingerprint(inputs())
    stamped, _, missing = STAMP.read_text().partition("\n") if STAMP.exists() else ("", "", "")
    if stamped == current and PYTHON.exists():
        say(f"up to date {missing}".rstrip())
        return 0
    make_venv()
    if not get_uv():
        say("failed; see the messages above")
        return 1
    compiled = Kernels()
    done = get_torch() and get_packages()
    outcome = compiled.wait()
    if not done:
        say("failed; see the messages above")
        return 1
    write_finder()
    STAMP.write_text(f"{current}\n{outcome}")
    say(f"done {outcome}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
