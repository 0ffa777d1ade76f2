"""Precedence, origins, and what the environment and YAML files may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from modulm.config.sources import (
    Source,
    draft,
    environment,
    keywords,
)
from modulm.errors import ConfigError
from modulm_cli.yaml_file import yaml_file
from modulm_server.flags import ServerConfig


def file(path: Path, text: str) -> Source:
    path = path / "flags.yaml"
    path.write_text(text, encoding="utf-8")
    return yaml_file(path)


def test_command_line_beats_file_beats_environment_beats_default(tmp_path: Path) -> None:
    source = file(tmp_path, "port: 2\nmax-num-seqs: 20\n")
    env = environment({"MODULM_PORT": "3", "MODULM_MAX_NUM_SEQS": "30", "MODULM_SEED": "33"})
    joined = draft(Source("command line", {"port": "1"}), source, env)
    config = joined.config
    assert (config.group(ServerConfig).port, config.scheduler.max_num_seqs, config.model.seed) == (
        1,
        20,
        33,
    )
    assert config.model.dtype == "auto"
    assert joined.origins == {
        "port": "command line",
        "max_num_seqs": f"file {tmp_path / 'flags.yaml'}",
        "seed": "MODULM_SEED",
    }
    assert joined.explicit == {"port", "max_num_seqs", "seed"}


def test_keywords_beat_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODULM_SEED", "5")
    monkeypatch.setenv("MODULM_DTYPE", "float32")
    joined = keywords(seed=7)
    assert (joined.config.model.seed, joined.config.model.dtype) == (7, "float32")
    assert joined.origins == {"seed": "keyword", "dtype": "MODULM_DTYPE"}


def test_parts_of_a_table_come_from_several_sources(tmp_path: Path) -> None:
    source = file(tmp_path, "structured-outputs-config:\n  disable_any_whitespace: true\n")
    line = Source("command line", {"structured_outputs_config": '{"enable_in_reasoning": true}'})
    group = draft(line, source).config.structured_outputs
    assert group.enable_in_reasoning
    assert group.disable_any_whitespace


def test_yaml_takes_dashes_underscores_switches_and_lists(tmp_path: Path) -> None:
    source = file(
        tmp_path,
        "max_model_len: 4k\nno-enable-prefix-caching: true\nserved-model-name: [a, b]\n"
        "hf-overrides: {rope_theta: 5}\n",
    )
    config = draft(source).config
    assert config.model.max_model_len == 4000
    assert config.cache.enable_prefix_caching is False
    assert config.model.served_model_name == ("a", "b")
    assert config.model.hf_overrides == {"rope_theta": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", ["prot", "port", "flags.yaml"]),
        ("port: many", ["port", "flags.yaml"]),
        ("- a\n- b", ["config", "not a table"]),
        ("a: [", ["config", "not valid YAML"]),
    ],
)
def test_errors_name_flag_and_file(tmp_path: Path, text: str, message: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        draft(file(tmp_path, text))
    assert all(word in str(caught.value) for word in message)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        yaml_file(tmp_path / "none.yaml")


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert file(tmp_path, "# nothing\n").values == {}


def test_lists_in_the_environment() -> None:
    env = environment({"MODULM_API_KEY": "a, b", "MODULM_SERVED_MODEL_NAME": '["x,y"]'})
    config = draft(env).config
    assert config.group(ServerConfig).api_key == ("a", "b")
    assert config.model.served_model_name == ("x,y",)


def test_an_error_in_the_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="from MODULM_PORT"):
        draft(environment({"MODULM_PORT": "x"}))


def test_unknown_variables_are_told_or_refused() -> None:
    env = environment({"MODULM_PROT": "1", "VLLM_PORT": "2", "OTHER": "3"})
    notices = [str(notice) for notice in draft(env).notices]
    assert len(notices) == 2
    assert "MODULM_PROT" in notices[0]
    assert "MODULM_PORT" in notices[1]
    strict = Source("command line", {"fail_on_environ_validation": True})
    with pytest.raises(ConfigError, match="MODULM_PROT"):
        draft(strict, env)
