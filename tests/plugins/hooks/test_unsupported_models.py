"""Models that cannot run are recognized by their files; the bridge refuses them by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modulm.errors import UnsupportedError
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm.plugins.selection import Selection
from modulm_hooks_unsupported_models.hooks import modulm_explain_folder, modulm_explain_model

WHISPER = {"architectures": ["WhisperForConditionalGeneration"], "num_mel_bins": 80}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (WHISPER, "a speech model: pip install modulm-whisper"),
        ({"feat_extract_norm": "group"}, "a speech model: use transcripts with a text model"),
        (
            {"architectures": ["Own", "BartForConditionalGeneration"], "is_encoder_decoder": True},
            "an encoder-decoder: pip install modulm-bart",
        ),
        (
            {"architectures": ["Own"], "is_encoder_decoder": True},
            "an encoder-decoder: no package of this project supports it",
        ),
        ({"architectures": ["LlamaForCausalLM"], "is_encoder_decoder": False}, None),
        ({}, None),
    ],
)
def test_kinds_of_models(config: dict[str, Any], expected: str | None) -> None:
    assert modulm_explain_model(config) == expected


def test_kinds_of_folders(tmp_path: Path) -> None:
    assert modulm_explain_folder(tmp_path) is None
    (tmp_path / "model_index.json").touch()
    assert "diffusion pipeline" in (modulm_explain_folder(tmp_path) or "")


@pytest.mark.parametrize(
    ("off", "expected"),
    [("", "pip install modulm-whisper"), ("-modulm-hooks-unsupported-models", "no package")],
)
def test_the_bridge_refuses_with_and_without_the_explanation(off: str, expected: str) -> None:
    config_type = manager.current().load("models", "transformers").config_type
    table = {**WHISPER, "model_type": "whisper"}
    with (
        manager.using(PluginManager(Selection.parse(off))),
        pytest.raises(
            UnsupportedError, match=f"WhisperForConditionalGeneration is .*speech model: {expected}"
        ),
    ):
        config_type.from_table(table, "config.json")
