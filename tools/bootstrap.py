"""Set up .venv with what a clone needs. Needs only Python; does nothing if it is up to date.

`bootstrap.py` installs everything, for tests and checks; `bootstrap.py --serve` what `make serve`
needs: the packages of a server, and the CPU kernels for this processor alone. Both take one call of
uv, which downloads and installs beside the compiler. torch comes from where pip's configuration
says; without any, from PyTorch's builds for this machine's devices. A torch for GPUs includes
Triton; for others on Linux, Triton is installed from the index, to interpret kernels in tests.
SKBUILD_CMAKE_DEFINE=MODULM_LEVELS=all builds the kernels of all levels.
Settings: UV and pip's environment variables.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import venv
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / "python"
SUPPORTED = ((3, 11), (3, 14))
TORCH_AT_LEAST = (2, 9)
TORCH = "torch==2.13.*"
UV = "uv>=0.9,<1"
#: Seconds between two lines about work that takes long.
PROGRESS = 10.0
STARTED = time.monotonic()


def say(message: str) -> None:
    """Print a progress message, with the seconds so far."""
    print(f"setup: {time.monotonic() - STARTED:3.0f} s: {message}", flush=True)


# What to install.


def packages() -> list[Path]:
    """Return the folders of pure Python distributions, the core first."""
    plugins = sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))
    libraries = sorted(path.parent for path in ROOT.glob("core/*/*/pyproject.toml"))
    return [ROOT, *libraries, *plugins, ROOT / "kernels/pallas", ROOT / "kernels/triton"]


def served_packages() -> list[Path]:
    """Return the folders that a server of this machine needs, with what they depend on."""
    extras = tomllib.loads((ROOT / "tools/extras.toml").read_text(encoding="utf-8"))
    gpus = ("cuda",) if shutil.which("nvidia-smi") else ()
    devices = {name: set(folders) for name, folders in extras["devices"].items()}
    wanted = set().union(*(devices[name] for name in ("any", "cpu", *gpus)))
    apart = {name for names in extras["apart"].values() for name in names}
    projects = {}
    for folder in packages():
        table = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        projects[table["project"]["name"]] = (folder, table["project"].get("dependencies", ()))
    of_devices = set().union(*devices.values()) | {"kernels/pallas", "kernels/triton"}
    todo = [
        name
        for name, (folder, _) in projects.items()
        if (where := folder.relative_to(ROOT).as_posix()) in wanted
        or (where not in of_devices and name not in apart)
    ]
    chosen: dict[str, None] = {}
    while todo:
        name = todo.pop(0)
        if name not in chosen:
            chosen[name] = None
            needed = (re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in projects[name][1])
            todo += [other for other in needed if other in projects]
    return [folder for name, (folder, _) in projects.items() if name in chosen]


def kernels() -> list[Path]:
    """Return the folders of compiled distributions."""
    return [path.parent for path in [ROOT / "kernels/cpu/pyproject.toml"] if path.exists()]


# Whether it is up to date.


def inputs() -> Iterator[Path]:
    """Yield the files whose change requires a new installation."""
    yield ROOT / "constraints.txt"
    yield ROOT / "tools/extras.toml"
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


class Stamp:
    """A file that tells what an installation was made from, and what is missing in it.

    A full installation is one for a server, too.
    """

    def __init__(self, name: str, *, serves: bool) -> None:
        self._files = [VENV / f".modulm-{name}stamp"]
        if serves:
            self._files.append(VENV / f".modulm-{name}serve-stamp")

    def missing(self, current: str) -> str | None:
        """Return what an up-to-date installation lacks, "" if nothing; None if there is none."""
        for file in self._files:
            stamped, _, missing = file.read_text().partition("\n") if file.exists() else ("",) * 3
            if stamped == current:
                return missing
        return None

    def write(self, current: str, missing: str = "") -> None:
        """Record an installation."""
        self._files[-1].write_text(f"{current}\n{missing}")


# How.


def compiler() -> str | None:
    """Return the path of the C++ compiler, or None."""
    names = [os.environ.get("CXX") or "c++", "g++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def run(*command: str | Path, quietly: bool = False) -> bool:
    """Run a command and return whether it succeeded."""
    output = subprocess.DEVNULL if quietly else None
    words = [str(part) for part in command]
    return subprocess.call(words, cwd=ROOT, stdout=output, stderr=output) == 0


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
    """Create .venv if it is missing or broken. uv installs pip into it later, which is faster."""
    if PYTHON.exists() and ask("print(1)") == "1":
        return
    say(f"making .venv with Python {sys.version.split()[0]}")
    venv.create(VENV, with_pip=False, clear=True, symlinks=os.name != "nt")


def get_uv() -> bool:
    """Install uv in .venv if needed, with the pip of this interpreter, or one for .venv."""
    if installed("uv"):
        return True
    say("installing uv")
    pip = (sys.executable, "-m", "pip", "--python", PYTHON, "install", "--quiet", UV)
    if run(*pip, quietly=True):
        return True
    return run(PYTHON, "-m", "ensurepip") and run(PYTHON, "-m", "pip", "install", "--quiet", UV)


def torch_sources() -> list[str]:
    """Return uv's options for where pip's configuration finds packages; without any, uv chooses
    PyTorch's index for this machine's devices.
    """
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    options: list[str] = []
    names = {"index-url": "--default-index", "extra-index-url": "--index"}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        for source in shlex.split(value.strip("'\"").replace("\\n", " ")):
            name = key.rpartition(".")[2]
            if name == "find-links":
                options += ["--find-links", source]
            elif name in names and not source.startswith("file:"):
                options += [names[name], source]
    if not options:
        return ["--torch-backend", "auto"]
    return [*options, "--index-strategy", "unsafe-best-match"]


def install(*options: str | Path) -> list[str]:
    """Return the command that installs packages of this repository."""
    uv = [BIN / "uv", "pip", "install", "--quiet", "--python", PYTHON]
    return [str(part) for part in [*uv, "--constraints", "constraints.txt", *options]]


def editable(folders: list[Path]) -> list[str | Path]:
    """Return options that install `folders` as editable."""
    return [part for folder in folders for part in ("-e", folder)]


#: Endings of the final message that describe what is missing.
NO_COMPILER = (
    "without the CPU kernels: there is no C++ compiler (Debian: apt install g++; macOS: "
    "xcode-select --install), so plain torch computes, several times slower"
)
NOT_BUILT = (
    "WITHOUT THE CPU KERNELS: building them failed, so plain torch computes, several times slower; "
    "make clean, then again, shows why"
)


class Kernels:
    """The compiled packages, which are built in parallel to the rest, if they have changed.

    serves: only for this processor, without the plain level that tests compare with.
    """

    def __init__(self, *, serves: bool) -> None:
        self._build: subprocess.Popen[bytes] | None = None
        self._current = fingerprint(kernel_inputs())
        self._stamp = Stamp("kernels-", serves=serves)
        if compiler() and kernels() and self._stamp.missing(self._current) is None:
            say("compiling the CPU kernels meanwhile")
            anew = [f"--reinstall-package=modulm-kernels-{folder.name}" for folder in kernels()]
            command = install("--no-deps", *anew, *editable(kernels()))
            levels = {"SKBUILD_CMAKE_DEFINE": f"MODULM_LEVELS={'best' if serves else 'native'}"}
            self._build = subprocess.Popen(command, cwd=ROOT, env={**levels, **os.environ})

    def report(self) -> str:
        """Return a line about the compiler's progress; "" if it does not run."""
        if self._build is None or self._build.poll() is not None:
            return ""
        files = sum(1 for folder in kernels() for _ in folder.glob("build/**/*.o"))
        return f"{files} files of the CPU kernels compiled"

    def wait(self) -> str:
        """Wait for the build and return what is missing, "" if nothing."""
        if self._build is not None:
            if self._build.wait():
                return NOT_BUILT
            self._stamp.write(self._current)
        return NO_COMPILER if kernels() and not compiler() else ""


class Progress:
    """Prints what is still being done, every few seconds."""

    def __init__(self, kernel_build: Kernels) -> None:
        self.doing = ""
        self._kernels = kernel_build
        self._over = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._over.wait(PROGRESS):
            parts = [part for part in (self.doing, self._kernels.report()) if part]
            if parts:
                say("; ".join(parts))

    def stop(self) -> None:
        """Print no more."""
        self._over.set()


def get_packages(progress: Progress, *, serves: bool) -> bool:
    """Install everything that is not compiled, as editable, in one call."""
    folders = served_packages() if serves else packages()
    options: list[str | Path] = ["pip", *editable(folders)]
    version = installed("torch")
    if version >= TORCH_AT_LEAST:
        say(f"keeping torch {'.'.join(map(str, version))}")
        sources = []
    else:
        options.append(TORCH)
        sources = torch_sources()
    if not serves:
        groups = ["dev"] if ask("import triton; print(1)") else ["dev", "triton"]
        options += [part for group in groups for part in ("--group", group)]
    say(f"installing {len(folders)} packages of this repository, and what they need")
    progress.doing = "downloading and installing packages"
    done = run(*install(*sources, *options))
    if not done and "--torch-backend" in sources:
        say("again, with torch from PyPI")
        done = run(*install(*options))
    progress.doing = ""
    return done


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


def write_finder(folders: list[Path]) -> None:
    """Make .venv find each installed package of this repository in one step."""
    paths = {
        path.parent.name: str(path.parent)
        for folder in folders
        for path in [*folder.glob("*/__init__.py"), *folder.glob("core/modulm/__init__.py")]
        if path.parent.name.startswith(("modulm", "pytest_modulm"))
    }
    target = Path(ask("import sysconfig; print(sysconfig.get_path('purelib'))"))
    (target / "_modulm_workspace.py").write_text(FINDER.format(packages=paths))
    (target / "_modulm_workspace.pth").write_text("import _modulm_workspace\n")


def main(*arguments: str) -> int:
    """Bring .venv up to date. Returns 0 on success."""
    if not SUPPORTED[0] <= sys.version_info[:2] < SUPPORTED[1]:
        say(f"Python 3.11 to 3.13 is needed, this is {sys.version.split()[0]}")
        say("select another one: make PYTHON=python3.12 ...")
        return 1
    serves = "--serve" in arguments
    stamp, current = Stamp("", serves=serves), fingerprint(inputs())
    missing = stamp.missing(current)
    if missing is not None and PYTHON.exists():
        say(f"up to date {missing}".rstrip())
        return 0
    make_venv()
    if not get_uv():
        say("failed; see the messages above")
        return 1
    compiled = Kernels(serves=serves)
    progress = Progress(compiled)
    done = get_packages(progress, serves=serves)
    outcome = compiled.wait()
    progress.stop()
    if not done:
        say("failed; see the messages above")
        return 1
    write_finder(served_packages() if serves else packages())
    stamp.write(current, outcome)
    say(f"done {outcome}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
