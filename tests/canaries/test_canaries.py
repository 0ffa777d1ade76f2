"""Packages written against the last release, frozen: they run, or their error says what changed.

They are installed by path: a folder with their metadata, as pip would write it, goes on sys.path.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import httpx
import pytest

from modulm import LLM, EngineConfig, SamplingParams
from modulm.errors import PluginBroken
from modulm.plugins import Check, PluginManager
from modulm.plugins.manager import using
from modulm.testing import kit
from modulm.testing.checkpoints import make_tiny

CANARIES = Path(__file__).parent


@pytest.fixture
def plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[[str, Path], None]
) -> Iterator[PluginManager]:
    """The process's plugins with both canaries among them."""
    for canary in ("model", "hooks"):
        install(canary, tmp_path)
        monkeypatch.syspath_prepend(str(CANARIES / canary))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    with using(PluginManager()) as manager:
        yield manager
    for name in set(sys.modules) - before:
        if "canary" in name:
            del sys.modules[name]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = make_tiny(tmp_path / "checkpoint", "Qwen3ForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["CanaryTooForCausalLM"]  # which the hook package declares
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_model_keeps_its_contract(plugins: PluginManager) -> None:
    found = plugins.find("models", "CanaryForCausalLM")
    assert found.origin == "modulm-canary 0.1.0"
    kit.check("models", plugins.load_declared(found))


def test_the_hooks_answer(plugins: PluginManager, checkpoint: Path) -> None:
    flags = {"disable_frontend_multiprocessing": True, "runner": "generate"}
    with LLM(str(checkpoint), **flags) as llm:
        chosen = llm.generate(["Hello"] * 5, SamplingParams(max_tokens=4, ignore_eos=True))
    hooks = import_module("modulm_hooks_canary")
    assert plugins.problems == {}
    assert all(7 not in answer.outputs[0].token_ids for answer in chosen)
    assert hooks.REASONS == ["length"] * 5
    told = hooks.TOLD
    assert (told["final"], told["loaded"], told["stopping"], told["admitted"]) == (1, 1, 1, 5)
    assert told["seqs"] == told["running"] == 3
    assert told["steps"] >= 8
    assert told["parameters"] > 10


def test_it_is_explained(plugins: PluginManager, checkpoint: Path, capsys) -> None:
    from modulm.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["explain", str(checkpoint)])
    said = capsys.readouterr().out
    assert ended.value.code in (0, None)
    assert "device: cpu (the canary lives on CPUs; chosen by canary (modulm-hooks-canary" in said
    assert "sdpa (the canary likes sdpa on cpu; chosen by canary (modulm-hooks-canary" in said
    assert "max_num_seqs: 3 (proposed: a small cage)" in said


def test_the_server_has_its_route(plugins: PluginManager, tmp_path: Path) -> None:
    from modulm.testing.checkpoints import make_tokenizer
    from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
    from modulm_server.testing import serve_in_thread
    from modulm_tokenizers.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "tokenizer"))
    engine = ScriptedEngine(tokenizer, lambda prompt, params: Reply(), scripted_info(tokenizer))
    with serve_in_thread(engine, EngineConfig.from_keywords(model="M")) as live:
        assert httpx.get(f"{live.url}/canary").json() == {"song": "tweet"}
    assert "canary is installed" in plugins.gather("modulm_report_header", config=None)
    assert Check("canary", True, "sings") in plugins.gather("modulm_doctor_checks")


@pytest.mark.parametrize(
    ("kind", "name", "now"),
    [
        ("models", "WalkingCanaryForCausalLM", "modulm.ops.walk is now modulm_layers.chunked_scan"),
        ("speculators", "canary", "modulm.contracts.speculator is now modulm.contracts.drafter"),
    ],
)
def test_what_no_longer_runs_says_what_changed(
    plugins: PluginManager, kind: str, name: str, now: str
) -> None:
    with pytest.raises(PluginBroken, match=rf"{kind}/{name} \(modulm-canary 0.1.0\)") as error:
        plugins.load(kind, name)
    assert now in str(error.value)
