"""collect-env: the report, without secrets."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from modulm_command_collect_env.command import command as collect_env
from modulm_command_collect_env.environment import reported_environment


def test_the_report_masks_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODULM_API_KEY", "hunter2")
    result = CliRunner().invoke(collect_env, ["--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["environment"]["MODULM_API_KEY"] == "***"
    assert "hunter2" not in result.output
    assert report["packages"]["torch"]
    assert any("commands/serve" in names for names in report["plugins"].values())
    assert "cpu" in report["platforms"]
    assert "packages" in CliRunner().invoke(collect_env, []).output


def test_reports_mask_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODULM_API_KEY", "hunter2")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    variables = reported_environment()
    assert variables["MODULM_API_KEY"] == variables["HF_TOKEN"] == "***"
    assert variables["OMP_NUM_THREADS"] == "1"
