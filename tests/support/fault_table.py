"""The table of fault sites, and the record of those whose faults have been tried.

The record has a line for each module: how many sites and faults were tried, and a digest of the
module's source at that time. It holds while the source is the same.
"""

from __future__ import annotations

import json
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from attrs import asdict, field, frozen
from fault_sites import kinds_of

ROOT = Path(__file__).parents[2]
#: What runs beside or below requests. Commands end with their errors.
SCOPE = (
    "core/serving/server", "core/serving/fleet", "core/libs/*", "plugins/routes/*",
    "plugins/executors/*", "plugins/kv_connectors/*",
)  # fmt: skip
#: Modules of tests and kits.
TOOLS = ("testing", "scripted", "kits")
TABLE = ROOT / "tests/server/fault_sites.toml"
RECORD = ROOT / "tests/server/fault_record.toml"
ROWS = tomllib.loads(TABLE.read_text())
REACHED: dict[str, dict[str, str]] = ROWS["reached"]
#: The test that is run with a fault at the site, by module (see `fault_sweep`).
TRIED: dict[str, dict[str, str]] = ROWS["tried"]
#: The function of this project that is called at the site, as module:name, by module.
CALLS: dict[str, dict[str, str]] = ROWS["calls"]
ELSEWHERE: dict[str, list[str]] = ROWS["elsewhere"]
#: By module or a beginning of its name.
TESTS: dict[str, str] = ROWS["tests"]
#: What happens when a server starts and stops, which the fault may prevent.
LIFE = "start and stop"
#: uvicorn's main loop, which does nothing that can fail.
CLOCK = "Server.on_tick: await super().on_tick(counter)"


def sources() -> dict[str, Path]:
    """The file of each module."""
    paths = {}
    for pattern in SCOPE:
        for folder in sorted(ROOT.glob(pattern)):
            for path in sorted(folder.rglob("*.py")):
                name = ".".join(path.relative_to(folder).with_suffix("").parts)
                name = name.removesuffix(".__init__")
                if name.rpartition(".")[2] not in TOOLS and not name.endswith("_kit"):
                    paths[name] = path
    return paths


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()[:16]


class Trial(NamedTuple):
    """A fault. scenario: what reaches its site."""

    site: str
    scenario: str
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.site}, by {self.scenario!r}"


def trials_of(rows: dict[str, str]) -> list[Trial]:
    """All faults of a module. rows: the scenario of each site.

    Only requests are cancelled: batches and servers end by other ways, with their own tests.
    """
    trials = []
    for site, scenario in rows.items():
        lasts = scenario == LIFE or scenario.startswith("a batch")
        kinds = () if site == CLOCK else kinds_of(site)
        if lasts and len(kinds) > 1:
            kinds = tuple(kind for kind in kinds if kind != "cancel")
        trials += [Trial(site, scenario, kind) for kind in kinds]
    return trials


@frozen
class Line:
    """What was tried of a module. on: the day. failed: what went wrong, and at which site."""

    source: str
    sites: int
    faults: int
    on: str
    failed: list[str] = field(factory=list)


Lines = dict[str, Line]


def read_record() -> dict[str, Lines]:
    """By "scenarios" and "tests", and by module."""
    tables = tomllib.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {
        name: {module: Line(**line) for module, line in tables.get(name, {}).items()}
        for name in ("scenarios", "tests")
    }


def write_record(record: dict[str, Lines]) -> None:
    """Of modules that have no rows any more, nothing is kept."""
    text = "# Written by tests/support/fault_run.py.\n"
    for name, table in (("scenarios", REACHED), ("tests", TRIED)):
        text += f"\n[{name}]\n"
        for module, line in sorted(record[name].items()):
            if module in table:
                fields = [(key, value) for key, value in asdict(line).items() if value != []]
                inside = ", ".join(f"{key} = {json.dumps(value)}" for key, value in fields)
                text += f"{json.dumps(module)} = {{ {inside} }}\n"
    RECORD.write_text(text)


def left(name: str) -> list[str]:
    """Modules whose faults have not all been tried, or not passed, since their source changed."""
    paths, lines = sources(), read_record()[name]
    table = {"scenarios": REACHED, "tests": TRIED}[name]
    return [
        module
        for module, rows in table.items()
        if (line := lines.get(module)) is None
        or line.failed
        or (line.source, line.sites) != (digest(paths[module]), len(rows))
    ]
