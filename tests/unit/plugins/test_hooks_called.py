"""Every hook is asked or told by the engine, the server or the command line itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from modulm import LLM, EngineConfig, SamplingParams
from modulm.contracts.outputs import Finished
from modulm.contracts.pooling import PoolingRecipe, TextRules
from modulm.contracts.request_listener import RequestListener
from modulm.contracts.sampling import LogitsProcessor
from modulm.errors import CheckpointError, ConfigError, EngineDead, EngineError, ModulmError
from modulm.loading import open_checkpoint
from modulm.loading.sources import tokenizer_path
from modulm.plugins import Check, Choice, Declaration, PluginManager, current, hookimpl
from modulm.plugins.manager import using
from modulm.testing.checkpoints import make_tiny

Told = list[tuple[str, dict[str, Any]]]


class Quiet(LogitsProcessor):
    """Wants no row."""

    api = 1

    def admit(self, view: Any) -> bool:
        return False

    def apply_row(self, view: Any, logits: Any) -> Any:
        return logits


class Ended(RequestListener):
    """Notes what it is told."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def ended(self, request: Finished) -> None:
        self._watcher.note("ended", request=request)


class Watcher:
    """Answers the choosing hooks with what there is and remembers all it is told."""

    def __init__(self) -> None:
        self.events: Told = []
        #: What a download of a checkpoint gives.
        self.folder: Path | None = None

    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    def first(self, name: str) -> dict[str, Any]:
        return next(facts for event, facts in self.events if event == name)

    def note(self, hook: str, **facts: Any) -> None:
        self.events.append((hook, facts))

    @hookimpl
    def modulm_choose_model(self, architectures: Any, config: Any) -> Choice:
        self.note("choose_model", architectures=architectures, config=config)
        return Choice(architectures[0], "watched")

    @hookimpl
    def modulm_choose_attention(self, spec: Any, platform: Any) -> Choice:
        self.note("choose_attention", spec=spec, platform=platform)
        return Choice("sdpa", "watched")

    @hookimpl
    def modulm_choose_quantization(self, checkpoint: Any, platform: Any) -> Choice:
        self.note("choose_quantization", checkpoint=checkpoint, platform=platform)
        return Choice("none", "watched")

    @hookimpl
    def modulm_choose_parser(self, kind: str, checkpoint: Any) -> Choice | None:
        self.note("choose_parser", kind=kind, checkpoint=checkpoint)
        return Choice("hermes", "watched") if kind == "tool_parsers" else None

    @hookimpl
    def modulm_pooling(self, checkpoint: Any, config: Any) -> PoolingRecipe:
        self.note("pooling", checkpoint=checkpoint, config=config)
        texts = TextRules(prompts={"query": "query: "}, default_prompt="query")
        return PoolingRecipe(
            kind="embed",
            settings={"pooling_type": "MEAN", "normalize": False},
            layers=lambda device: (lambda x: 2 * x[:, :3],),
            max_length=16,
            texts=texts,
        )

    @hookimpl
    def modulm_fetch_checkpoint(self, name: str, config: Any, files: Any) -> Path | None:
        self.note("fetch_checkpoint", name=name, config=config, files=files)
        return self.folder

    @hookimpl
    def modulm_explain_folder(self, folder: Path) -> str | None:
        self.note("explain_folder", folder=folder)
        return "watched over"

    @hookimpl(tryfirst=True)
    def modulm_explain_model(self, config: Any) -> str | None:
        self.note("explain_model", config=config)
        return "a model of another kind" if "own_kind" in config else None

    @hookimpl
    def modulm_config_final(self, config: Any) -> None:
        self.note("config_final", config=config)

    @hookimpl
    def modulm_model_built(self, model: Any, config: Any) -> None:
        self.note("model_built", meta=all(p.is_meta for p in model.parameters()))

    @hookimpl
    def modulm_model_loaded(self, model: Any, config: Any) -> None:
        self.note("model_loaded", meta=any(p.is_meta for p in model.parameters()))

    @hookimpl
    def modulm_drafter(self, config: Any, model: Any, platform: Any) -> None:
        self.note("drafter", config=config, model=model, platform=platform)

    @hookimpl
    def modulm_adapter_bank(self, config: Any, platform: Any, ops: Any) -> None:
        self.note("adapter_bank", config=config, platform=platform, ops=ops)

    @hookimpl
    def modulm_engine_started(self, config: Any) -> None:
        self.note("engine_started", config=config)

    @hookimpl
    def modulm_engine_stopping(self) -> None:
        self.note("engine_stopping")

    @hookimpl
    def modulm_engine_failed(self, error: BaseException) -> None:
        self.note("engine_failed", error=error)

    @hookimpl
    def modulm_request_admitted(self, request: str, params: Any) -> None:
        self.note("request_admitted", request=request, params=params)

    @hookimpl
    def modulm_request_finished(self, request: str, reason: str) -> None:
        self.note("request_finished", request=request, reason=reason)

    @hookimpl
    def modulm_logits_steps(self, config: Any, vocabulary: int) -> Sequence[LogitsProcessor]:
        import torch

        self.note("logits_steps", vocabulary=vocabulary)
        return [Quiet(vocabulary, torch.device("cpu"))]

    @hookimpl
    def modulm_step_finished(self, stats: Any) -> None:
        self.note("step_finished", stats=stats)

    @hookimpl
    def modulm_request_listeners(self, config: Any) -> list[RequestListener]:
        self.note("request_listeners", config=config)
        return [Ended(self)]

    @hookimpl
    def modulm_app_created(self, app: Any, config: Any) -> None:
        self.note("app_created", app=app, config=config)

    @hookimpl
    def modulm_report_header(self, config: Any) -> list[str]:
        self.note("report_header", config=config)
        return ["watched over"]

    @hookimpl
    def modulm_doctor_checks(self) -> list[Check]:
        self.note("doctor_checks")
        return [Check("watching", True)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    with using(PluginManager()) as plugins:
        watcher = Watcher()
        plugins.add(watcher, "watcher")
        yield watcher


def test_one_answer_from_end_to_end(watcher: Watcher, checkpoint: Path) -> None:
    flags = {"device": "cpu", "disable_frontend_multiprocessing": True, "runner": "generate"}
    with LLM(str(checkpoint), **flags) as llm:
        llm.generate(["Hello"], SamplingParams(max_tokens=3, ignore_eos=True))
    order = [name for name in dict.fromkeys(watcher.names()) if not name.startswith("choose_")]
    assert order == [
        "config_final",
        "adapter_bank",
        "model_built",
        "model_loaded",
        "drafter",
        "logits_steps",
        "engine_started",
        "request_listeners",
        "request_admitted",
        "step_finished",
        "request_finished",
        "ended",
        "engine_stopping",
    ]
    chosen = {name for name in watcher.names() if name.startswith("choose_")}
    assert chosen == {"choose_model", "choose_quantization", "choose_attention"}
    assert watcher.first("model_built")["meta"]
    assert not watcher.first("model_loaded")["meta"]
    assert watcher.first("request_finished")["reason"] == "length"
    assert watcher.first("ended")["request"].generated == [3]
    assert watcher.first("logits_steps")["vocabulary"] == 512


def test_a_recipe_for_pooling(watcher: Watcher, checkpoint: Path) -> None:
    flags = {"device": "cpu", "dtype": "float32"}
    with LLM(str(checkpoint), **flags) as llm:
        (doubled,) = llm.embed("Hello", use_tqdm=False)
        ids = llm.get_tokenizer().encode("query: Hello")
        assert llm.info.max_model_len == 16
    with LLM(str(checkpoint), pooler_config={"task": "token_embed"}, **flags) as llm:
        assert llm.info.tasks == ("token_embed",)
        (tokens,) = llm.encode([ids], use_tqdm=False)
    assert doubled.prompt_token_ids == ids
    assert watcher.first("pooling")["checkpoint"].path == checkpoint
    vectors = tokens.outputs.data
    assert vectors.shape == (len(ids), 3)
    assert doubled.outputs.embedding == pytest.approx(vectors.mean(0).tolist(), abs=1e-4)


def test_a_checkpoint_of_a_plugin(watcher: Watcher, checkpoint: Path) -> None:
    watcher.folder = checkpoint
    config = EngineConfig.from_keywords(model="shelf://tiny", tokenizer="shelf://words")
    assert open_checkpoint(config, current()).path == checkpoint
    assert tokenizer_path(config, "") == str(checkpoint)
    asked = [facts for name, facts in watcher.events if name == "fetch_checkpoint"]
    assert [facts["name"] for facts in asked] == ["shelf://tiny", "shelf://words"]
    assert ["*.safetensors" in facts["files"].patterns for facts in asked] == [True, False]


def test_a_folder_that_is_no_model(watcher: Watcher, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: watched over"):
        open_checkpoint(EngineConfig.from_keywords(model=str(tmp_path)), current())
    assert watcher.first("explain_folder") == {"folder": tmp_path}


@pytest.mark.parametrize("kind", [{"own_kind": True}, {}])
def test_a_model_that_no_package_supports(
    watcher: Watcher, tmp_path: Path, kind: dict[str, bool]
) -> None:
    table = {"architectures": ["NobodyForCausalLM"], **kind}
    (tmp_path / "config.json").write_text(json.dumps(table))
    said = "is a model of another kind" if kind else "no installed plugin provides"
    with pytest.raises(ModulmError, match=f"NobodyForCausalLM.*{said}|{said}.*Nobody"):
        LLM(str(tmp_path), device="cpu")
    assert watcher.first("explain_model") == {"config": table}


def test_who_asks_for_text_gets_no_recipe(watcher: Watcher, checkpoint: Path) -> None:
    with LLM(str(checkpoint), device="cpu", runner="generate") as llm:
        assert llm.info.tasks == ("generate",)
    assert "pooling" not in watcher.names()


def test_failure(watcher: Watcher, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from modulm.engine.worker.model_runner import ModelRunner

    def fail(self: Any, plan: Any) -> Any:
        raise EngineDead("the device is gone")

    flags = {"device": "cpu", "disable_frontend_multiprocessing": True, "runner": "generate"}
    with LLM(str(checkpoint), **flags) as llm:
        monkeypatch.setattr(ModelRunner, "run", fail)
        with suppress(EngineError):
            llm.generate(["Hello"], SamplingParams(max_tokens=3))
    assert "the device is gone" in str(watcher.first("engine_failed")["error"])


def test_choosing_a_parser(watcher: Watcher, checkpoint: Path) -> None:
    from modulm_parsing.choice import with_declared_parsers

    config = with_declared_parsers(EngineConfig.from_keywords(model=str(checkpoint)), current())
    assert config.tool_calls.tool_call_parser == "hermes"
    assert config.structured_outputs.reasoning_parser == "qwen3", "by the template: no plugin did"
    kinds = [facts["kind"] for name, facts in watcher.events if name == "choose_parser"]
    assert kinds == ["tool_parsers", "reasoning_parsers"]


def test_a_model_that_is_to_call_tools_needs_a_parser(checkpoint: Path) -> None:
    from modulm_parsing.choice import with_declared_parsers

    flags_asked = {"enable_auto_tool_choice": True}
    for flags in ({"chat_template": "{{ messages }}"}, {"tool_call_parser": "none"}):
        config = EngineConfig.from_keywords(model=str(checkpoint), **flags_asked, **flags)
        with pytest.raises(ConfigError, match="tool_call_parser: required by"):
            with_declared_parsers(config, current())
    config = with_declared_parsers(
        EngineConfig.from_keywords(model="demo", **flags_asked), current()
    )
    assert config.tool_calls.tool_call_parser == "hermes"


def test_server(watcher: Watcher, tmp_path: Path) -> None:
    from modulm.testing.checkpoints import make_tokenizer
    from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
    from modulm_server.serve import banner
    from modulm_server.testing import serve_in_thread
    from modulm_tokenizers.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(make_tokenizer(tmp_path))
    engine = ScriptedEngine(tokenizer, lambda prompt, params: Reply(), scripted_info(tokenizer))
    config = EngineConfig.from_keywords(model="M")
    with serve_in_thread(engine, config):
        assert watcher.first("app_created")["app"].routes
    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert "watched over" in banner(config, current(), sock)


DECLARING = {
    "modulm_models": "models",
    "modulm_attention": "attention",
    "modulm_quantization": "quantization",
    "modulm_platforms": "platforms",
    "modulm_parsers": "reasoning_parsers",
}


@pytest.mark.parametrize(("hook", "kind"), DECLARING.items())
def test_declaring(hook: str, kind: str) -> None:
    def declare() -> list[Declaration]:
        return [Declaration("extra", "no.such:Thing", api=1, kind=kind)]

    declare.__name__ = hook
    plugin = type("Plugin", (), {hook: staticmethod(hookimpl(declare))})()
    plugins = PluginManager()
    plugins.add(plugin, "declares")
    assert plugins.find(kind, "extra").target == "no.such:Thing"


def test_doctor_and_header_gathered(watcher: Watcher) -> None:
    assert current().gather("modulm_doctor_checks") == [Check("watching", True)]
    assert current().gather("modulm_report_header", config=None) == ["watched over"]
