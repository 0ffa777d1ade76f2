from __future__ import annotations

import json

import pytest

from modulm.config import EngineConfig
from modulm.engine.sampling.end_ids import end_ids
from modulm.errors import CheckpointError, ConfigError
from modulm_frontend.defaults import sampling_defaults

FILE = {"temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 99, "do_sample": True,
        "transformers_version": "5", "eos_token_id": [1, 2]}  # fmt: skip


def config(**flags) -> EngineConfig:
    return EngineConfig.from_keywords(**flags)


def test_the_checkpoints_recommendations_are_taken() -> None:
    expected = {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    assert sampling_defaults(config(), FILE) == expected
    assert end_ids(config(), FILE, {"eos_token_id": 7}) == (1, 2)
    assert end_ids(config(), {}, {"eos_token_id": 7}) == (7,)
    assert end_ids(config(), {}, {}) == ()


@pytest.mark.parametrize("nobody", ["vllm", "modulm"])
def test_they_can_be_left_out_and_overridden(nobody) -> None:
    flags = {"override_generation_config": {"top_k": 5, "eos_token_id": 3}}
    assert sampling_defaults(config(generation_config=nobody), FILE) == {}
    assert sampling_defaults(config(generation_config=nobody, **flags), FILE) == {"top_k": 5}
    assert sampling_defaults(config(**flags), FILE)["top_k"] == 5
    assert end_ids(config(**flags), FILE, {}) == (3,)


def test_another_folder_may_be_named(tmp_path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"min_p": 0.1}))
    assert sampling_defaults(config(generation_config=str(tmp_path)), FILE) == {"min_p": 0.1}
    with pytest.raises(ConfigError, match="missing"):
        sampling_defaults(config(generation_config=str(tmp_path / "missing")), FILE)


@pytest.mark.parametrize("wrong", [{"top_k": "5"}, {"temperature": -1}, {"colour": 1}])
def test_wrong_overrides(wrong) -> None:
    with pytest.raises(ConfigError) as caught:
        sampling_defaults(config(override_generation_config=wrong), {})
    assert caught.value.field == "override_generation_config"
    assert next(iter(wrong)) in str(caught.value)


def test_wrong_values_in_the_file() -> None:
    with pytest.raises(CheckpointError, match=r"generation_config.json: top_p must be"):
        sampling_defaults(config(), {"top_p": 7})
    with pytest.raises(ConfigError, match="eos_token_id"):
        end_ids(config(), {"eos_token_id": ["a"]}, {})
