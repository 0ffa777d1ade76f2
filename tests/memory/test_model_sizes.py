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
    if model.parameters is not None:
        assert rank.parameters == pytest.approx(model.parameters * 1e9, rel=TOLERANCE)
    assert not rank.weights.notes
    assert TOOL["row"](model, found) in TOOL["PAGE"].read_text(), "run tools/model_sizes.py"


def test_every_package_of_models_has_a_row():
    """The demo is no model of anyone's."""
    assert {model.package for model in MODELS.values()} == {*TOOL["families"]()} - {"demo"}
    page = TOOL["PAGE"].read_text()
    assert all(f"| {model.model} (" in page for model in MODELS.values())
