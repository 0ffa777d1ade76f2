"""`owner/name:Q4_K_M`: files of GGUF repositories by their type, from a hub that real clients ask
over HTTP."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from fake_hub import COMMIT, serve_hub
from huggingface_hub import constants
from tests.plugins.quantization.gguf_files import write_gguf

from modulm.config import EngineConfig
from modulm.errors import CheckpointError
from modulm.loading import open_checkpoint
from modulm.plugins import current
from modulm.testing.checkpoints import make_tiny


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Repositories of GGUF files: one file for each type, one in pieces in a folder."""
    root = tmp_path_factory.mktemp("hub")
    folder = root / "someone" / "some-gguf"
    folder.mkdir(parents=True)
    whole = folder / "model-Q8_0.gguf"
    write_gguf(make_tiny(root / "plain"), whole, "llama", lambda name, shape: "Q8_0")
    for name in ("model-Q4_K_M", "model-UD-Q4_K_M", "mmproj-model-F16", "model.imatrix"):
        (folder / f"{name}.gguf").write_bytes(b"GGUF of no use")
    pieces = folder / "BF16"
    pieces.mkdir()
    for at in (1, 2):
        (pieces / f"model-BF16-{at:05d}-of-00002.gguf").write_bytes(b"GGUF %d" % at)
    (folder / "README.md").write_text("no weights")
    (root / "someone" / "plain").mkdir()
    (root / "someone" / "plain" / "config.json").write_text("{}")
    return root, whole


@pytest.fixture
def hub(models, monkeypatch):
    with serve_hub(models[0], monkeypatch) as server:
        yield server


def opened(name, tmp_path, **flags):
    flags = {"download_dir": str(tmp_path / "cache"), **flags}
    return open_checkpoint(EngineConfig.from_keywords(model=name, **flags), current())


@pytest.mark.parametrize("part", ["Q8_0", "q8_0", "model-Q8_0.gguf"])
def test_a_type_of_a_repository_of_gguf_files(hub, models, tmp_path, part):
    checkpoint = opened(f"someone/some-gguf:{part}", tmp_path)
    assert checkpoint.path.read_bytes() == models[1].read_bytes()
    assert checkpoint.architecture == "LlamaForCausalLM"
    fetched = {path for kind, path in hub.requests if kind == "GET" and "/resolve/" in path}
    assert fetched == {f"/someone/some-gguf/resolve/{COMMIT}/model-Q8_0.gguf"}


def test_what_was_fetched_serves_without_a_connection(hub, tmp_path, monkeypatch):
    first = opened("someone/some-gguf:Q8_0", tmp_path).path
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert opened("someone/some-gguf:Q8_0", tmp_path).path == first
    with pytest.raises(CheckpointError, match=r"Q4_K_M: no file has this type; .*: Q8_0$"):
        opened("someone/some-gguf:Q4_K_M", tmp_path)
    message = "'someone/plain' is not in the local cache and the hub cannot be reached"
    with pytest.raises(CheckpointError, match=message):
        opened("someone/plain:Q8_0", tmp_path)
    assert hub.requests == []


def test_all_pieces_of_a_model_are_fetched(hub, tmp_path):
    with pytest.raises(CheckpointError, match=r"model-BF16-00001-of-00002\.gguf"):  # of no use
        opened("someone/some-gguf:BF16", tmp_path)
    fetched = [path[-26:] for kind, path in hub.requests if kind == "GET" and "/resolve/" in path]
    assert sorted(fetched) == [f"model-BF16-0000{at}-of-00002.gguf"[-26:] for at in (1, 2)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "someone/some-gguf:Q2_K",
            r"Q2_K: no file has this type; available: BF16, Q4_K_M, Q8_0, UD-Q4_K_M",
        ),
        ("someone/plain:Q8_0", r"someone/plain:Q8_0: no installed loader knows of parts"),
        ("someone/nobody:Q8_0", "no model 'someone/nobody' on the hub"),
        ("someone/some-gguf:", "is neither a folder nor a hub id"),
        ("../some:Q8_0", "is neither a folder nor a hub id"),
    ],
)
def test_a_type_that_is_not_there_is_said(hub, tmp_path, name, message):
    with pytest.raises(CheckpointError, match=message):
        opened(name, tmp_path)


def test_a_revision_that_is_not_there_is_said(hub, tmp_path):
    with pytest.raises(CheckpointError, match="has no revision 'v9'"):
        opened("someone/some-gguf:Q8_0", tmp_path, revision="v9")


@pytest.mark.exhaustive
def test_a_process_that_is_told_the_endpoint_answers(hub, tmp_path):
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    line = [sys.executable, "-m", "modulm", "explain", "someone/some-gguf:Q8_0"]
    run = subprocess.run(line, env={**os.environ, **variables}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Q8_0" in run.stdout


@pytest.mark.parametrize(
    ("part", "names", "wanted"),
    [
        ("Q4_K_M", ["a.Q4_K_M.gguf", "a.Q4_K_S.gguf"], ["a.Q4_K_M.gguf"]),
        ("q4_0", ["x/a_Q4_0.gguf", "a-Q4_0_4_4.gguf"], ["x/a_Q4_0.gguf"]),
        ("UD-IQ1_S", ["a-UD-IQ1_S.gguf", "a-IQ1_S.gguf"], ["a-UD-IQ1_S.gguf"]),
        ("IQ1_S", ["a-UD-IQ1_S.gguf", "a-IQ1_S.gguf"], ["a-IQ1_S.gguf"]),
        ("Q6_K", ["model.safetensors"], None),
        ("Q6_K", ["a-Q6_K.gguf", "b-Q6_K.gguf"], "several files have this type"),
        ("Q6_K", ["a-Q6_K-00001-of-00002.gguf"], "missing a-Q6_K-00002-of-00002.gguf"),
    ],
)
def test_which_files_a_type_means(part, names, wanted):
    loader = current().load("loaders", "gguf")
    if isinstance(wanted, str):
        with pytest.raises(CheckpointError, match=wanted):
            loader.choose_files(part, names)
    else:
        assert loader.choose_files(part, names) == wanted
