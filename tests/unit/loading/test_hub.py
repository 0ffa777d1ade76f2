"""What a person reads when the hub cannot give a model; the hub client itself is stood in for."""

from __future__ import annotations

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from modulm.config import EngineConfig
from modulm.contracts.tokenizer_loader import TokenizerLoader
from modulm.errors import CheckpointError
from modulm.loading import open_checkpoint
from modulm.plugins import current
from modulm.plugins.manager import PluginManager
from modulm.plugins.selection import Selection
from modulm.testing.bundles import BundleLoader
from modulm.testing.checkpoints import make_tiny

RESPONSE = httpx.Response(404, request=httpx.Request("GET", "https://hub.example"))


def config(**flags):
    return EngineConfig.from_keywords(model="someone/some-model", **flags)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError("no", response=RESPONSE), "is gated: accept its terms"),
        (
            errors.RepositoryNotFoundError("no", response=RESPONSE),
            "no model 'someone/some",
        ),
        (errors.RevisionNotFoundError("no", response=RESPONSE), "has no revision 'v9'"),
        (errors.LocalEntryNotFoundError("no"), "not in the local cache and the hub cannot be"),
        (ConnectionError("no route"), "use a local folder, or download it with a connection"),
    ],
)
def test_each_failure_says_what_to_do(monkeypatch, error, message):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(config(revision="v9"), current())


def test_a_download_asks_for_no_code_and_no_pickles(monkeypatch, tmp_path):
    make_tiny(tmp_path)
    download_arguments = {}

    def download(name, **keywords):
        download_arguments.update(keywords, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint = open_checkpoint(config(revision="v1", hf_token="secret"), current())
    assert checkpoint.architecture == "LlamaForCausalLM"
    expected = {"name": "someone/some-model", "revision": "v1", "token": "secret"}
    assert expected.items() <= download_arguments.items()
    wanted = {*download_arguments["allow_patterns"]}
    # What two loaders of tokenizers read: DeepSeek's encodings for their texts, never run.
    assert {"encoding/*.py", "*.model.v*"} <= wanted
    rest = wanted - {"encoding/*.py", "*.model.v*"}
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in rest)


class Foreign(TokenizerLoader):
    """A loader that nobody here knows."""

    name, api, files = "foreign", 1, ("words/*.own",)

    @classmethod
    def claims(cls, folder):
        return None

    @classmethod
    def open(cls, path, revision, trust_remote_code):
        raise NotImplementedError


def test_a_download_brings_what_loaders_of_tokenizers_read(monkeypatch, tmp_path):
    make_tiny(tmp_path)
    patterns = []

    def download(name, *, allow_patterns, **keywords):
        patterns.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    plugins = PluginManager()
    plugins.register("tokenizers", "broken", "no.such.module:Loader")
    plugins.register("tokenizers", "foreign", Foreign)
    open_checkpoint(config(), plugins)
    assert "words/*.own" in patterns
    patterns.clear()
    open_checkpoint(config(), PluginManager(Selection.parse("-modulm-parser-deepseek")))
    assert not {"words/*.own", "encoding/*.py"} & {*patterns}


class Bundles(BundleLoader):
    """A format that nobody here knows."""

    downloads = ("*.bundle",)


@pytest.mark.parametrize(
    ("load_format", "weights"),
    [
        ("auto", {"*.safetensors", "consolidated*.safetensors", "*.bundle"}),
        ("bundle", {"*.bundle"}),
        ("pt", {"pytorch_model*.bin"}),
        ("mistral", {"consolidated*.safetensors"}),
        ("dummy", set()),
    ],
)
def test_a_download_brings_what_the_loader_reads(monkeypatch, tmp_path, load_format, weights):
    make_tiny(tmp_path)
    downloads = []

    def download(name, *, allow_patterns, **keywords):
        downloads.append(set(allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    plugins = PluginManager()
    plugins.register("loaders", "bundle", Bundles)
    open_checkpoint(config(load_format=load_format), plugins)
    others = {"*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "encoding/*.py", "*.model.v*"}
    assert [patterns - others for patterns in downloads] == [weights]


def test_pickled_weights_are_downloaded_where_there_are_no_others(monkeypatch, tmp_path):
    make_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    downloads = []

    def download(name, *, allow_patterns, revision, **keywords):
        downloads.append((revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    open_checkpoint(config(revision="v1"), current())
    assert [revision for revision, _ in downloads] == ["v1", "v1"]
    assert downloads[1][1] == ["model.tensors", "pytorch_model*.bin"]


@pytest.mark.parametrize("revision", [None, "main", "abc123"])
def test_the_commit_that_is_served_is_logged(monkeypatch, tmp_path, caplog, revision):
    """M10: unless it was asked for by name."""
    folder = make_tiny(tmp_path / "snapshots" / "abc123")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kw: str(folder))
    with caplog.at_level("INFO", logger="modulm"):
        open_checkpoint(config(revision=revision), current())
    messages = [record.getMessage() for record in caplog.records if "commit" in record.getMessage()]
    wanted = "model someone/some-model is at commit abc123; use --revision to pin it"
    assert messages == ([] if revision == "abc123" else [wanted])
