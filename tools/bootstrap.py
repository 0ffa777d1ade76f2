"""Set up .venv with everything a clone needs. Needs only Python; does nothing when up to date.

torch comes first and through pip, which takes a CPU build where pip is configured to find one;
all packages of this repository then come in one call of uv. A torch for GPUs brings a Triton of its
own; beside others the index's is installed on Linux, to interpret kernels in tests. The compiled
kernels are built meanwhile, for this processor only; SKBUILD_CMAKE_DEFINE=MODULM_LEVELS=all builds
all. Settings: UV and pip's variables.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / "python"
STAMP = VENV / ".modulm-stamp"
SUPPORTED = ((3, 11), (3, 14))
TORCH_AT_LEAST = (2, 9)
TORCH = "torch==2.13.*"
UV = "uv>=0.9,<1"


def say(message: str) -> None:
    """Tell what is being done."""
    print(f"setup: {message}", flush=True)


def packages() -> list[Path]:
    """Folders of the distributions that are pure Python, the core first."""
    plugins = sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))
    libraries = sorted(path.parent for path in ROOT.glob("core/*/*/pyproject.toml"))
    return [ROOT, *libraries, *plugins, ROOT / "kernels/triton"]


def kernels() -> list[Path]:
    """Folders of the distributions that are compiled."""
    return [path.parent for path in [ROOT / "kernels/cpu/pyproject.toml"] if path.exists()]


def inputs() -> Iterator[Path]:
    """Files whose change means that something must be installed again."""
    yield ROOT / "constraints.txt"
    yield Path(__file__)
    for folder in packages():
        yield folder / "pyproject.toml"
    for folder in kernels():
        for path in sorted(folder.rglob("*")):
            built = "build" in path.relative_to(folder).parts
            if path.suffix in {".toml", ".txt", ".cpp", ".h", ".hpp", ".cc"} and not built:
                yield path


def processor() -> list[str]:
    """What decides for which processor the kernels are built, as far as it is told."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    found = {flag for flag in flags if flag.startswith(("avx", "amx", "fma", "f16c", "bmi"))}
    return [*sorted(found), os.environ.get("SKBUILD_CMAKE_DEFINE", "")]


def fingerprint() -> str:
    """Changes when an input, the interpreter, the compiler or the processor does."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {compiler()} {VENV} {processor()}".encode())
    for path in inputs():
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    names = [os.environ.get("CXX") or "c++", "g++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def run(*command: str | Path) -> bool:
    """Run a command and say whether it went well."""
    return subprocess.call([str(part) for part in command], cwd=ROOT) == 0


def ask(code: str) -> str:
    """What the interpreter of .venv prints; empty if it fails."""
    done = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def installed(distribution: str) -> tuple[int, ...]:
    """Major and minor version of a distribution in .venv; empty if it is not there."""
    version = ask(f"from importlib.metadata import version; print(version({distribution!r}))")
    return tuple(int(part) for part in version.split(".")[:2]) if version else ()


def make_venv() -> None:
    """Make .venv if it is not there or does not work."""
    if PYTHON.exists() and ask("print(1)") == "1":
        return
    say(f"making .venv with Python {sys.version.split()[0]}")
    venv.create(VENV, with_pip=True, clear=True)


def get_torch() -> bool:
    """Keep a torch that is new enough, else get one with pip."""
    found = installed("torch")
    if found >= TORCH_AT_LEAST:
        say(f"keeping torch {'.'.join(map(str, found))}")
        return True
    say(f"installing {TORCH} (takes a while the first time)")
    # Bytecode of all of torch takes longer than that of what is imported, when it is.
    fast = ("--quiet", "--prefer-binary", "--no-compile")
    return run(PYTHON, "-m", "pip", "install", *fast, TORCH)


#: Ends of the sentence that says what is lost.
NO_COMPILER = (
    "without the CPU kernels: there is no C++ compiler (Debian: apt install g++; macOS: "
    "xcode-select --install), so plain torch computes, several times slower"
)
NOT_BUILT = (
    "WITHOUT THE CPU KERNELS: building them failed, so plain torch computes, several times slower; "
    "make clean, then again, shows why"
)


def get_uv() -> bool:
    """Have uv in .venv."""
    return bool(installed("uv")) or run(PYTHON, "-m", "pip", "install", "--quiet", UV)


def install(*options: str | Path) -> list[str]:
    """The command that installs packages of this repository."""
    uv = [BIN / "uv", "pip", "install", "--quiet", "--python", PYTHON]
    return [str(part) for part in [*uv, "--constraints", "constraints.txt", *options]]


def editable(folders: list[Path]) -> list[str | Path]:
    """Options that install `folders` such that a change in them shows at once."""
    return [part for folder in folders for part in ("-e", folder)]


class Kernels:
    """The compiled packages, which need nothing of what is installed beside them."""

    def __init__(self) -> None:
        self._build: subprocess.Popen[bytes] | None = None
        if compiler() and kernels():
            say(f"compiling {len(kernels())} packages of kernels meanwhile")
            anew = [f"--reinstall-package=modulm-kernels-{folder.name}" for folder in kernels()]
            command = install("--no-deps", *anew, *editable(kernels()))
            self._build = subprocess.Popen(command, cwd=ROOT)

    def wait(self) -> str:
        """What is lost, "" if nothing, once they are built or have failed."""
        if self._build is not None:
            return NOT_BUILT if self._build.wait() else ""
        return NO_COMPILER if kernels() else ""


def get_packages() -> bool:
    """Install everything that is not compiled, editable, in one call."""
    say(f"installing {len(packages())} packages of this repository")
    groups = ["dev"] if ask("import triton; print(1)") else ["dev", "triton"]
    named = [part for group in groups for part in ("--group", group)]
    return run(*install(*named, *editable(packages())))


def main() -> int:
    """Bring .venv up to date. 0 if all is well."""
    if not SUPPORTED[0] <= sys.version_info[:2] < SUPPORTED[1]:
        say(f"Python 3.11 to 3.13 is needed, this is {sys.version.split()[0]}")
        say("name another one: make PYTHON=python3.12 ...")
        return 1
    wanted = fingerprint()
    found, _, lost = STAMP.read_text().partition("\n") if STAMP.exists() else ("", "", "")
    if found == wanted and PYTHON.exists():
        say(f"up to date {lost}".rstrip())
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
    STAMP.write_text(f"{wanted}\n{outcome}")
    say(f"done {outcome}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
