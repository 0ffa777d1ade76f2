"""docs/models.md names every model that the packages here offer."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
#: The models of other libraries and of other checkpoints, and the embedded one.
_OTHERS = {"modulm-transformers", "modulm-multimodal-text", "modulm-demo"}


def test_each_row_is_a_package_and_its_architectures():
    rows = re.findall(
        r"^\| `([\w-]+)` \| .* \| (.*) \|$", (ROOT / "docs/models.md").read_text(), re.M
    )
    listed = {name: set(re.findall(r"`(\w+)`", cells)) for name, cells in rows}
    offered = {}
    for file in (ROOT / "plugins/models").glob("*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        offered[project["name"]] = set(project["entry-points"].get("modulm.models", ()))
    assert listed == {name: names for name, names in offered.items() if name not in _OTHERS}
