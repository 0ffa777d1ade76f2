"""docs/security.md names flags that exist, with the defaults that they have."""

from __future__ import annotations

import re
from pathlib import Path

from modulm.config.schema.catalog import catalog

PAGE = Path(__file__).resolve().parents[3] / "docs" / "security.md"
UNITS = {None: 1, " s": 1, " KiB": 1 << 10, " MiB": 1 << 20, " GiB": 1 << 30}
#: Limits whose default is elsewhere than in the flag: the page says what then applies.
ELSEWHERE = {"--h11-max-incomplete-event-size": 1 << 16, "--h11-max-header-count": 256}


def test_the_named_tests_exist() -> None:
    """Each row of the last table names test files, and perhaps functions of them."""
    rows = PAGE.read_text().partition("## Which test holds what")[2].splitlines()
    headers = ("| promise", "| limit or failure", "| trust or threat")
    rows = [row for row in rows if row.startswith("| ") and not row.startswith(headers)]
    assert len(rows) > 15
    for row in rows:
        files = [PAGE.parents[1] / path for path in re.findall(r"`(tests/[a-z0-9_/]+\.py)`", row)]
        assert files, f"names no test: {row}"
        assert [file for file in files if not file.is_file()] == [], row
        text = "".join(file.read_text() for file in files)
        for function in re.findall(r"`(test_[a-z0-9_]+)`", row):
            assert f"def {function}(" in text, f"{function}: {row}"


def test_what_make_fuzz_repeats_draws_examples() -> None:
    """And the records that the page names exist."""
    text = PAGE.read_text()
    row = next(row for row in text.splitlines() if "that `make fuzz` repeats" in row)
    files = re.findall(r"`(tests/[a-z0-9_/]+\.py)`", row)
    assert len(files) >= 8
    for file in files:
        source = (PAGE.parents[1] / file).read_text()
        drawn = r"@(hypothesis\.)?given\(|def test_\w+\([^)]*\b(rng|rounds)\b"
        assert re.search(drawn, source), file
    for record in re.findall(r"`(bench/results/[a-z0-9-]+\.md)`", text):
        assert (PAGE.parents[1] / record).is_file(), record


def first_cells(text: str) -> set[str]:
    rows = [row for row in text.splitlines() if row.startswith("| ")]
    return {row.split(" | ")[0].removeprefix("| ") for row in rows} - {"what", "what happens"}


def test_each_limit_and_failure_has_a_test() -> None:
    text = PAGE.read_text()
    sections = {title: text.partition(f"## {title}\n")[2].partition("\n## ")[0]
                for title in ("Limits", "Failures", "Which test holds what")}  # fmt: skip
    promises = first_cells(sections["Limits"]) | first_cells(sections["Failures"])
    assert len(promises) > 40
    held = first_cells(sections["Which test holds what"].partition("| limit or failure |")[2])
    assert promises == held


def test_all_who_are_trusted_and_each_threat_have_a_test() -> None:
    """But for who may do everything, and what nothing protects from."""
    text, promises = PAGE.read_text(), set()
    for title, cell in (("Trust", 2), ("Plugins", 1)):
        section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
        rows = [row.strip("|").split("|") for row in section.splitlines() if row.startswith("| ")]
        promises |= {
            row[0].strip() for row in rows[1:]
            if row[cell].strip() and not row[cell].strip().startswith("None")
        }  # fmt: skip
    table = text.partition("| trust or threat |")[2].partition("\n\n")[0]
    assert len(promises) > 10
    assert promises == first_cells(table)


def test_flags_and_defaults() -> None:
    text, specs, tables = PAGE.read_text(), catalog().specs, catalog().tables
    names = set(re.findall(r"`(--[a-z0-9-]+)[^`]*`", text)) - {"--plugins", "--host"}
    assert len(names) > 20
    known = {f"--{name.replace('_', '-')}" for name in (*specs, *tables)}
    assert names - known == set()
    defaults = re.findall(r"`(--[a-z0-9-]+)` \((\d[\d,]*)( s| [KMG]iB)?\)", text)
    assert len(defaults) > 8
    for name, number, unit in defaults:
        value = int(number.replace(",", "")) * UNITS[unit or None]
        default = specs[name[2:].replace("-", "_")].default
        assert ELSEWHERE.get(name, default) == value, name
