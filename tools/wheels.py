"""Build a wheel of every distribution into a folder: wheels.py [FOLDER] [--kernels all|built|none].

Pure packages take a few hundredths of a second each, several in parallel. The wheel of the kernels
holds the libraries of all levels and takes minutes to build; `built` packs those that setup has
compiled for this machine instead, and `none` leaves that package out.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = str(Path(sys.executable).with_name("uv"))
COMPILED = ROOT / "kernels/cpu"
LEVELS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")


def folders() -> list[Path]:
    """Return the folders of all distributions that are not compiled."""
    files = [ROOT / "pyproject.toml"]
    for pattern in ("core/*/*", "kernels/*", "plugins/*/*"):
        files += sorted(ROOT.glob(f"{pattern}/pyproject.toml"))
    return [path.parent for path in files if path.parent != COMPILED]


def build(folder: Path, out: Path, *options: str) -> None:
    """Build one wheel. Raises SystemExit with the output of a failed build."""
    command = [UV, "build", "--wheel", "--quiet", "--no-create-gitignore", "--out-dir", str(out)]
    done = subprocess.run(
        [*command, *options, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"wheels: {folder.relative_to(ROOT)}: {done.stderr or done.stdout}")


def build_kernels(out: Path) -> None:
    """Compile the kernels of all levels for this CPU architecture."""
    build(COMPILED, out, "-C", "cmake.define.MODULM_LEVELS=all")


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


def build_all(out: Path, kernels: str) -> list[Path]:
    """Build all wheels into a folder, replacing others of this project; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("modulm*.whl"):
        old.unlink()
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(build, folder, out) for folder in folders()]
        if kernels != "none":
            jobs.append(pool.submit(build_kernels if kernels == "all" else pack_kernels, out))
        for job in jobs:
            job.result()
    return sorted(out.glob("modulm*.whl"))


def main(arguments: list[str]) -> int:
    """Build the wheels and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--kernels", choices=("all", "built", "none"), default="all")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    wheels = build_all(options.folder.resolve(), options.kernels)
    size = sum(path.stat().st_size for path in wheels) / 1e6
    seconds = time.monotonic() - started
    print(f"wheels: {len(wheels)} in {options.folder}, {size:.1f} MB, {seconds:.0f} s")
    print(f"wheels: pip install --find-links {options.folder} 'modulm[cpu]'")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
