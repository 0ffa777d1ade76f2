"""Say what has become of each architecture of vLLM 0.33's registry, row by row.

    .venv/bin/python tools/registry_rows.py           # counts per section
    .venv/bin/python tools/registry_rows.py ROWS.csv  # write the column `now` of a list of rows

The states come from the installed packages (`tools/reference.py`), what the bridge was tried with
from the lists in docs/transformers.md, which tests keep equal to what they run.
"""

from __future__ import annotations

import csv
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NATIVE, TESTED, DRAFTED = "native or converted", "bridge, tested", "drafter"
UNTESTED, TEXT, REFUSED = "bridge, untested", "text model alone", "refused"
#: Sections that are counted apart, or that are no models.
DRAFTERS, DELETED = "speculative_decoding_models", "previously_supported_models"
APART = {DRAFTERS, DELETED, "transformers_backend_models", "oot_supported_models"}
_DRAFTER = "a draft model; serve the model it drafts for"


def sections() -> dict[str, list[str]]:
    """Return the architectures of vLLM's registry by section."""
    return tomllib.loads((ROOT / "tools/vllm_architectures.toml").read_text(encoding="utf-8"))


def bridged_in_tests() -> set[str]:
    """Return the names in those paragraphs of docs/transformers.md that only list names."""
    page = (ROOT / "docs/transformers.md").read_text(encoding="utf-8")
    paragraphs = [part.strip() for part in page.split("\n\n")]
    lists = [part for part in paragraphs if re.fullmatch(r"(`\w+`(,|$)\s*)+", part)]
    return set(re.findall(r"`(\w+)`", "\n".join(lists)))


def now(states: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Return the state of each architecture. states: `architectures` of tools/reference.py."""
    tested = bridged_in_tests()
    rows = {}
    for name, (state, reason) in states.items():
        if state == "transformers":
            rows[name] = TESTED if name in tested else UNTESTED
        elif state == "refused":
            rows[name] = DRAFTED if reason.startswith(_DRAFTER) else REFUSED
        else:
            rows[name] = NATIVE if state == "native" else TEXT
    return rows


def summary(states: Mapping[str, tuple[str, str]], cells: Callable[..., str]) -> str:
    """Return a table of how many rows of each section run, and how. cells: makes a table's row."""
    kinds, rows = (NATIVE, TESTED, DRAFTED, UNTESTED, TEXT, REFUSED), now(states)
    text = f"| section | rows | {' | '.join(kinds)} |\n|---|{'---|' * (len(kinds) + 1)}\n"
    total: Counter[str] = Counter()
    for section, names in sections().items():
        counts = Counter(rows[name] for name in names)
        text += cells(
            section.replace("_", " "), str(len(names)), *(str(counts[kind]) for kind in kinds)
        )
        if section not in APART:
            total += counts
    numbers = (str(total[kind]) for kind in kinds)
    return text + cells("models, without the four apart", str(total.total()), *numbers)


def write(file: Path, states: Mapping[str, tuple[str, str]]) -> None:
    """Write the column `now` of a CSV file with a column `name`."""
    rows = now(states)
    with file.open(encoding="utf-8", newline="") as stream:
        table = list(csv.DictReader(stream))
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(dict.fromkeys([*table[0], "now"])))
        writer.writeheader()
        writer.writerows({**row, "now": rows[row["name"]]} for row in table)


def main(arguments: list[str]) -> int:
    from reference import architectures, cells

    print(summary(architectures(), cells))
    for each in arguments:
        write(Path(each), architectures())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
