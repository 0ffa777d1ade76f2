"""Ollama's library of models with Ollama's own client: create, copy, delete, pull and push."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from fake_hub import serve_hub
from tests.server.scripted_models import Several, several_models

from modulm.contracts.tokenizer import Tokenizer
from modulm.testing.adapters import write_lora
from modulm.testing.checkpoints import make_tiny
from modulm_chat.templates import execute
from modulm_checkpoint_short_names import NAMES
from modulm_route_ollama.go_template import TemplateError, to_jinja
from modulm_route_ollama.modelfile import read_modelfile, written
from modulm_server.models.library import ModelLibrary

CHATML = """{{- if .System }}<|im_start|>system
{{ .System }}<|im_end|>
{{ end }}{{ if .Prompt }}<|im_start|>user
{{ .Prompt }}<|im_end|>
{{ end }}<|im_start|>assistant
{{ .Response }}<|im_end|>
"""
MODERN = """{{- $last := -1 }}
{{- range $i, $_ := .Messages }}{{- if eq .Role "user" }}{{ $last = $i }}{{ end }}{{ end }}
{{- if or .System .Tools }}<|system|>
{{- if .System }}
{{ .System }}
{{- end }}
{{- if .Tools }}
{{- range .Tools }}
{"type": "function", "function": {{ .Function }}}
{{- end }}
{{- end }}
{{ end }}
{{- range $i, $m := .Messages }}
{{- $tail := eq (len (slice $.Messages $i)) 1 -}}
{{- if eq .Role "user" }}<|user|>{{ if eq $i $last }}!{{ end }}
{{ .Content }}
{{ else if eq .Role "assistant" }}<|assistant|>
{{- if .ToolCalls }}{{ range .ToolCalls }}
{"name": "{{ .Function.Name }}", "arguments": {{ .Function.Arguments }}}{{ end }}
{{ else }}
{{ .Content }}
{{ end }}
{{- end }}
{{- if and $tail (ne .Role "assistant") }}<|assistant|>
{{ end }}
{{- end }}"""


@pytest.fixture
def several(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Several]:
    folder = tmp_path / "models"
    make_tiny(folder / "tiny")
    flags: dict[str, Any] = {"models_dir": str(folder), "models_dir_writable": True}
    with several_models(tokenizer, monkeypatch, **flags) as server:
        yield server


@pytest.fixture
def client(several: Several) -> Iterator[ollama.Client]:
    ollama_client = ollama.Client(host=several.live.url, timeout=300)
    yield ollama_client
    ollama_client._client.close()


def names(client: ollama.Client) -> list[str | None]:
    return [model.model for model in client.list().models]


def test_a_model_of_another_is_created_copied_and_deleted(
    client: ollama.Client, several: Several, tmp_path: Path
) -> None:
    steps = client.create(
        "owner/pirate:v1", from_="tiny", system="Speak as a pirate.", template=CHATML,
        parameters={"temperature": 0.5, "stop": ["Arr", "Yo"], "num_ctx": 128, "num_gpu": 1},
        stream=True,
    )  # fmt: skip
    assert [step.status for step in steps] == [
        "reading model metadata", "PARAMETER num_gpu has no effect here", "success",
    ]  # fmt: skip
    answer = client.chat("owner/pirate:v1", [{"role": "user", "content": "Where to?"}])
    assert answer.message.content == "Hello there."
    engine: Any = several.model("owner/pirate:v1").engine
    prompt, params = engine.seen[-1]
    assert prompt["prompt"] == (
        "<|im_start|>system\nSpeak as a pirate.<|im_end|>\n"
        "<|im_start|>user\nWhere to?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert params.stop == ("Arr", "Yo")
    assert engine.info.max_model_len == 128
    assert engine.info.config.model.override_generation_config == {"temperature": 0.5}
    shown = client.show("owner/pirate:v1")
    assert shown.template == CHATML
    assert shown.modelfile is not None
    assert 'SYSTEM """Speak as a pirate."""' in shown.modelfile
    assert client.copy("owner/pirate:v1", "parrot").status == "success"
    weights = tmp_path / "models" / "parrot" / "model.safetensors"
    assert weights.stat().st_ino == (tmp_path / "models/tiny/model.safetensors").stat().st_ino
    assert client.delete("owner/pirate:v1").status == "success"
    assert names(client) == ["parrot", "tiny"]
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["parrot", "tiny"]
    # What a model was made from may be deleted; OpenAI's clients get its settings, too.
    client.delete("tiny")
    body = {"model": "parrot", "messages": [{"role": "user", "content": "Hi"}]}
    assert httpx.post(f"{several.live.url}/v1/chat/completions", json=body).is_success
    engine = several.model("parrot").engine
    assert "Speak as a pirate." in engine.seen[-1][0]["prompt"]


def test_a_modelfile_with_uploaded_files_and_an_adapter(
    client: ollama.Client, several: Several, tmp_path: Path
) -> None:
    """As older clients send it; the adapter changes all answers of the model."""
    adapter = write_lora(tmp_path / "lora", {"model.layers.0.self_attn.q_proj": (16, 16)}, 2)
    digests = {path.name: client.create_blob(path) for path in sorted(adapter.iterdir())}
    text = 'FROM tiny\n# a comment\nPARAMETER top_k 7\nSYSTEM """Be\nbrief."""\n'
    body = {"name": "brief", "modelfile": text, "adapters": digests, "stream": False}
    answer = httpx.post(f"{several.live.url}/api/create", json=body)
    assert answer.json() == {"status": "success"}, answer.text
    settings = several.model("brief").settings
    assert settings.adapters == ("brief",)
    assert settings.config.model.served_model_name == ("brief-without-adapter",)
    assert (tmp_path / "models" / "brief" / "adapter" / "adapter_config.json").is_file()
    assert list((tmp_path / "models" / ".blobs").iterdir()) == []
    checkpoint = tmp_path / "models" / "tiny"
    files = {path.name: client.create_blob(path) for path in checkpoint.iterdir()}
    assert client.create("uploaded", files=files).status == "success"
    assert (tmp_path / "models" / "uploaded" / "config.json").is_file()


#: Path, body, status and message of requests that change nothing.
WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("create", {"model": "../x", "from": "tiny"}, 400, "model must be NAME"),
    ("create", {"model": "x", "from": "/etc/passwd"}, 400, "must not be a path"),
    ("create", {"model": "x"}, 400, "from must name a model"),
    ("create", {"model": "tiny", "from": "tiny"}, 409, "delete it first"),
    ("create", {"model": "x", "from": "tiny", "parameters": {"tfs_z": 1}}, 400, "tfs_z"),
    ("create", {"model": "x", "from": "tiny", "parameters": {"top_k": "a"}}, 400, "an integer"),
    ("create", {"model": "x", "from": "tiny", "template": "{{ call .X }}"}, 400, "field .X"),
    ("create", {"model": "x", "modelfile": "RUN rm"}, 400, "line 1"),
    ("create", {"model": "x", "files": {"a.gguf": "sha256:0"}}, 400, "digest"),
    ("create", {"model": "x", "files": {"../a": "sha256:" + "0" * 64}}, 400, "name of a file"),
    ("copy", {"source": "nobody", "destination": "x"}, 404, "not served here"),
    ("copy", {"source": "tiny", "destination": "x\0"}, 400, "destination must be NAME"),
    ("push", {"model": "tiny"}, 400, "OWNER/NAME"),
    ("pull", {"model": "not a name"}, 400, "hub id"),
]


def test_what_cannot_be_created_is_said(several: Several, tmp_path: Path) -> None:
    for path, body, status, message in WRONG:
        answer = httpx.post(f"{several.live.url}/api/{path}", json=body, timeout=300)
        assert (answer.status_code, set(answer.json())) == (status, {"error"}), answer.text
        assert message in answer.json()["error"]
    assert list(several.states()) == ["tiny"]
    url = f"{several.live.url}/api/blobs/sha256:{'0' * 64}"
    assert httpx.head(url).status_code == 404
    answer = httpx.post(url, content=b"other")
    assert answer.status_code == 400
    assert answer.json() == {"error": "the uploaded file has another digest"}
    assert list((tmp_path / "models" / ".blobs").iterdir()) == []


def test_models_are_pulled_and_pushed_with_progress(
    client: ollama.Client,
    several: Several,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = tmp_path / "hub"
    make_tiny(root / "Qwen" / "Qwen3-0.6B")
    with serve_hub(root, monkeypatch) as hub:
        steps = list(client.pull("qwen3:0.6b", stream=True))
        assert steps[0].status == "pulling manifest"
        assert steps[-1].status == "success"
        assert steps[-3].completed == steps[-3].total > 0
        assert "Qwen/Qwen3-0.6B" in names(client)
        hello = [{"role": "user", "content": "hello"}]
        assert client.chat("qwen3:0.6b", hello).message.content == "Hello there."
        client.create("me/mine", from_="qwen3:0.6b", system="Be kind.")
        steps = list(client.push("me/mine", stream=True))
        assert steps[-1].status == "success"
        assert any(step.digest and step.completed == step.total for step in steps)
        assert (root / "me" / "mine" / "modulm.yaml").is_file()
        client.delete("me/mine")
        client.delete("qwen3:0.6b")
        assert names(client) == ["tiny"]
        assert client.pull("me/mine").status == "success"
        assert several.model("me/mine").settings.config.value("system_prompt") == "Be kind."
        with pytest.raises(
            ollama.ResponseError, match="no model 'me/nothing' on the hub"
        ) as caught:
            client.pull("hf.co/me/nothing")
        assert caught.value.status_code == 404
        assert hub.requests


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([("user", "a")], "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"),
        (
            [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c's \\ é")],
            (
                "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
                "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc's \\ é<|im_end|>\n"
                "<|im_start|>assistant\n"
            ),
        ),
    ],
)
def test_older_templates_are_repeated_for_each_turn(
    messages: list[tuple[str, str]], expected: str
) -> None:
    turns = [{"role": role, "content": content} for role, content in messages]
    variables = {"messages": turns, "add_generation_prompt": True}
    assert execute(to_jinja(CHATML), variables) == expected


def test_templates_of_messages() -> None:
    call = {"function": {"name": "look", "arguments": {"at": "x"}}}
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "b"},
    ]
    tools = [{"type": "function", "function": {"name": "look"}}]
    text = execute(to_jinja(MODERN), {"messages": turns, "tools": tools})
    assert text == (
        '<|system|>\ns\n{"type": "function", "function": {"name": "look"}}\n'
        '<|user|>\na\n<|assistant|>\n{"name": "look", "arguments": {"at": "x"}}\n'
        "<|user|>!\nb\n<|assistant|>\n"
    )
    for wrong, message in (
        ("{{ if .Prompt }}", "no {{ end }}"), ("{{ printf .Prompt }}", "'printf'"),
        ("{{ .Prompt", "has no end"), ("{{ end }}", "no beginning"), ("{{ . }}", "outside"),
    ):  # fmt: skip
        with pytest.raises(TemplateError, match=message):
            to_jinja(wrong)


def test_modelfiles_are_read_as_they_are_written() -> None:
    text = 'from a\nTEMPLATE """{{ .Prompt }}\n"""\nSYSTEM """s"""\n'
    text += 'PARAMETER stop "x y"\nPARAMETER stop z\n'
    read = read_modelfile(text)
    assert (read.base, read.system, read.template) == ("a", "s", "{{ .Prompt }}\n")
    assert read.parameters == {"stop": ["x y", "z"]}
    assert read_modelfile(written(read, "a")) == read


def test_settings_of_a_folder_cannot_run_code(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "modulm.yaml").write_text("model: ./\ntrust-remote-code: true\n")
    with pytest.raises(Exception, match="trust-remote-code is not one of"):
        list(ModelLibrary(tmp_path).models())


def test_short_names_are_declared() -> None:
    from modulm.plugins import manager

    declared = {one.name for one in manager.current().names("checkpoints")}
    assert NAMES.keys() <= declared
    assert {name: manager.current().load("checkpoints", name).source() for name in NAMES} == NAMES
