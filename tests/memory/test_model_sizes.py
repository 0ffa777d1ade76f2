"""Published models have their published number of parameters; docs/model-sizes.md shows them.

Nothing is downloaded: models are built from config.json, without memory for weights.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from samples import parametrize_sample

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools/model_sizes.py"), run_name="model_sizes")
MODELS = {model.model: model for model in TOOL["published"]()}
#: Cards round to two or three digits.
TOLERANCE = 0.01


@parametrize_sample("name", MODELS, every=38)
def test_parameters_and_row(name):
    model = MODELS[name]
    found = TOOL["estimate_of"](model)
    (rank,) = found.ranks
    assert rank.parameters == pytest.approx(model.parameters * 1e9, rel=TOLERANCE)
    assert not rank.weights.notes
    assert TOOL["row"](model, found) in TOOL["PAGE"].read_text(), "run tools/model_sizes.py"


def test_families_without_a_model_are_listed():
    page = TOOL["PAGE"].read_text()
    shown = {model.package for model in MODELS.values()} | {"demo"}
    missing = set(TOOL["families"]()) - shown
    assert all(name in page.split("Left out")[1] for name in missing)
    assert shown <= set(TOOL["families"]())
