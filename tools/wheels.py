"""Build a wheel of every distribution into a folder: wheels.py [FOLDER] [--kernels all|built|none].

Pure packages take some hundredths of a second each, several at a time. The kernels' one wheel holds
the libraries of all levels and takes minutes; `built` packs those that set-up has compiled for this
machine instead, which is enough to try things here, and `none` leaves that package out.
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
    """Folders of all distributions, those that are compiled left out."""
    found = [ROOT / "pyproject.toml"]
    for pattern in ("core/*/*", "kernels/*", "plugins/*/*"):
        found += sorted(ROOT.glob(f"{pattern}/pyproject.toml"))
    return [path.parent for path in found if path.parent != COMPILED]


def build(folder: Path, out: Path, *options: str) -> None:
    """One wheel. Raises SystemExit with what the build said."""
    command = [UV, "build", "--wheel", "--quiet", "--no-create-gitignore", "--out-dir", str(out)]
    done = subprocess.run(
        [*command, *options, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"wheels: {folder.relative_to(ROOT)}: {done.stderr or done.stdout}")


def build_kernels(out: Path) -> None:
    """The kernels of all levels that this kind of processor has, compiled."""
    build(COMPILED, out, "-C", "cmake.define.MODULM_LEVELS=all")


def pack_kernels(out: Path) -> None:
    """The kernels as they lie in this environment, with nothing compiled."""
    libraries = list(Path(sysconfig.get_path("platlib"), "modulm_kernels_cpu").glob("lib*.so"))
    if not libraries:
        raise SystemExit("wheels: no kernels are built in this environment; make setup builds them")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "kernels")
        shutil.copytree(COMPILED, folder, ignore=shutil.ignore_patterns("build", "__pycache__"))
        for path in libraries:
            shutil.copy(path, folder / "modulm_kernels_cpu")
        done = ("-C", "wheel.cmake=false", "-C", "wheel.platlib=true")
        build(folder, out, *done, "-C", "build-dir=")


def build_all(out: Path, kernels: str) -> list[Path]:
    """All wheels, in a folder that then holds no others of this project; those there are."""
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
    """Build, and say what was built."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--kernels", choices=("all", "built", "none"), default="all")
    asked = parser.parse_args(arguments)
    started = time.monotonic()
    made = build_all(asked.folder.resolve(), asked.kernels)
    size = sum(path.stat().st_size for path in made) / 1e6
    seconds = time.monotonic() - started
    print(f"wheels: {len(made)} in {asked.folder}, {size:.1f} MB, {seconds:.0f} s")
    print(f"wheels: pip install --find-links {asked.folder} 'modulm[cpu]'")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
