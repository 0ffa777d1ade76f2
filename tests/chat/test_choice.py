"""`modulm explain` says how conversations are encoded, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from modulm.config import EngineConfig
from modulm.errors import PluginNotFound
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tokenizer
from modulm_chat.choice import chat_decisions


def winners(
    folder: Path, chat_template: str | None = None, **flags: str | bool
) -> dict[str, str | None]:
    config = EngineConfig.from_keywords(model=str(folder), **flags)
    decisions = chat_decisions(config, folder, manager.current(), chat_template)
    assert all(decision.reason for decision in decisions)
    return {decision.subject: decision.winner for decision in decisions}


def test_what_a_folder_brings_decides(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    assert winners(folder) == {"tokenizer": "hf", "chat template": "the checkpoint's"}
    assert winners(folder, "hermes") == {"tokenizer": "hf", "chat template": "hermes"}
    by_mode = winners(folder, tokenizer_mode="deepseek_v4")
    assert by_mode == {"tokenizer": "deepseek_v4", "chat template": "deepseek_v4"}
    assert winners(folder, skip_tokenizer_init=True) == {}
    (folder / "chat_template.jinja").unlink()
    assert winners(folder) == {"tokenizer": "hf", "chat template": None}
    (folder / "config.json").write_text('{"model_type": "deepseek_v32"}')
    chosen = {"tokenizer": "deepseek_v32", "chat template": "deepseek_v32"}
    assert winners(folder) == chosen
    assert winners(folder, tokenizer_mode="hf") == {"tokenizer": "hf", "chat template": None}
    with pytest.raises(PluginNotFound, match="telepathy"):
        winners(folder, tokenizer_mode="telepathy")


def test_tekken_is_mistrals(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    config = EngineConfig.from_keywords(model=str(tmp_path))
    tokenizer, _ = chat_decisions(config, tmp_path, manager.current())
    assert tokenizer.winner == "mistral"
    assert "no tokenizer.json" in tokenizer.reason
    assert {verdict.name for verdict in tokenizer.candidates} >= {"deepseek_v32", "deepseek_v4"}
