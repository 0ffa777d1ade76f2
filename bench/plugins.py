"""Start-up cost of installed plugins: `modulm --help` and `modulm plugins list --metadata`.

    python bench/plugins.py [--packages 220] [--rounds 7] [--before COMMIT]

220 packages of another project are made in a folder: metadata with entry points of several kinds, a
module and a manifest each. Both commands are run with and without that folder, one after the other.
Figures are processor seconds (user and system), the lowest of all rounds: other load on the machine
adds to them and never takes away. "As wheels" is the same environment as pip makes it of wheels:
all packages in one folder, instead of an entry of the path for each editable one. --before also
runs both with the sources of another commit of this repository, from a worktree, which come before
the installed ones: a longer path, so compare it only with another commit.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("schedulers", "tool_parsers", "models", "commands", "routes", "loaders", "quantization")
COMMANDS = {"--help": ["--help"], "plugins list": ["plugins", "list", "--metadata"]}
MANIFEST = 'modulm = "0.1"\n\n[contracts]\n{kind} = [1, 1]\n\n[needs]\nnetwork = ["example.org"]\n'


def make_packages(site: Path, count: int) -> None:
    """Write installed distributions of another project."""
    for number in range(count):
        kind, name = KINDS[number % len(KINDS)], f"bench_{number}"
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[modulm.{kind}]\n{name} = {name}:Driver\n")
        (info / "RECORD").write_text("")
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("class Driver:\n    api = 1\n")
        (site / name / "modulm.toml").write_text(MANIFEST.format(kind=kind))


def as_wheels(folder: Path) -> None:
    """Link all installed packages and their metadata in one folder."""
    site = Path(next(path for path in sys.path if path.endswith("site-packages")))
    packages = [path for path in sys.path if Path(path).is_relative_to(ROOT)]
    for home in (*map(Path, packages), ROOT / "core", *ROOT.glob("kernels/*"), site):
        for path in home.iterdir():
            own = home == site or (path / "__init__.py").is_file()
            editable = path.suffix == ".pth" or path.name.startswith(("_editable", "__editable"))
            if own and not editable and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)


def seconds(arguments: list[str], path: list[str], flags: list[str]) -> float:
    """Processor seconds of one run of the command line. flags: of Python."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *flags, "-m", "modulm", *arguments],
        check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "COLUMNS": "100"},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def sources(tree: Path) -> list[str]:
    """Folders to import another tree's packages from, before the installed ones."""
    files = [*tree.glob("core/*/*/pyproject.toml"), *tree.glob("plugins/*/*/pyproject.toml")]
    return [str(tree / "core"), *(str(path.parent) for path in files)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=int, default=220)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--before", metavar="COMMIT")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        site, tree, wheels = (Path(name) / each for each in ("site", "tree", "wheels"))
        site.mkdir()
        wheels.mkdir()
        as_wheels(wheels)
        make_packages(site, arguments.packages)
        cases = {"now": [], f"now, {arguments.packages} packages more": [str(site)]}
        cases["as wheels"] = [str(wheels)]
        cases[f"as wheels, {arguments.packages} packages more"] = [str(wheels), str(site)]
        if arguments.before:
            git = ["git", "-C", str(ROOT), "worktree"]
            subprocess.run([*git, "add", "-f", "--detach", str(tree), arguments.before], check=True)
            cases[arguments.before] = sources(tree)
            cases[f"{arguments.before}, {arguments.packages} packages more"] = [
                *sources(tree),
                str(site),
            ]
        lowest: dict[tuple[str, str], float] = {}
        try:
            for _ in range(arguments.rounds):
                for case, path in cases.items():
                    flags = ["-S"] if "wheels" in case else []
                    for command, words in COMMANDS.items():
                        key = case, command
                        lowest[key] = min(lowest.get(key, 1e9), seconds(words, path, flags))
        finally:
            if arguments.before:
                subprocess.run([*git, "remove", "--force", str(tree)], check=True)
        for command in COMMANDS:
            for case in cases:
                print(f"modulm {command:13} {case:35} {lowest[case, command]:.3f} s")


if __name__ == "__main__":
    main()
