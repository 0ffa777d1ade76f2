"""Code that comes with a checkpoint: refused with the flag's name, run where the flag is given."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from modulm.errors import CheckpointError, ConfigError, UnsupportedError
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session
from modulm_tokenizers.tokenizer import load_tokenizer

TOKENS = [5, 77, 130, 9, 301]
CODE = """\
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({touched!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def custom_model(tmp_path, monkeypatch):
    """A checkpoint of an architecture that only its own code knows."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    folder, touched = make_tiny(tmp_path / "model"), tmp_path / "touched"
    (folder / "own_code.py").write_text(CODE.format(touched=str(touched)))
    change(
        folder,
        architectures=["OwnForCausalLM"],
        model_type="own",
        auto_map={
            "AutoConfig": "own_code.OwnConfig",
            "AutoModelForCausalLM": "own_code.OwnForCausalLM",
        },
    )
    return SimpleNamespace(folder=folder, touched=touched)


def change(folder, **keys):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def session(folder, **flags):
    return Session(folder, device="cpu", attention_backend="sdpa", kernels=["none"], **flags)


def test_without_the_flag_it_is_refused_and_the_flag_named(custom_model):
    with pytest.raises(ConfigError, match=r"OwnForCausalLM .*auto_map.*--trust-remote-code"):
        session(custom_model.folder)
    with pytest.raises(UnsupportedError, match=r"no OwnForCausalLM; .* --trust-remote-code"):
        session(custom_model.folder, model_impl="transformers")
    assert not custom_model.touched.exists()


def test_with_the_flag_its_own_code_runs_on_our_memory(custom_model, tmp_path):
    expected = session(make_tiny(tmp_path / "plain")).step({0: TOKENS})[0]
    opened = session(custom_model.folder, trust_remote_code=True)
    assert next(d.winner for d in opened.loaded.decisions) == "transformers_remote"
    assert custom_model.touched.exists()
    assert torch.allclose(opened.step({0: TOKENS})[0], expected, atol=1e-4)


@pytest.mark.parametrize("where", ["config.json", "nested", "quantization"])
def test_code_that_is_not_needed_is_not_run_and_asks_for_no_flag(custom_model, where):
    """Published checkpoints that have a native plugin often bring code for others."""
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    code = {"auto_map": {"AutoModel": "own_code.OwnForCausalLM"}}
    more = {
        "config.json": {},
        "nested": {"text_config": code},
        "quantization": {"vision_config": {"quantization_config": code}},
    }
    change(custom_model.folder, **names, **more[where])
    session(custom_model.folder).step({0: TOKENS})
    assert not custom_model.touched.exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ({"AutoModelForCausalLM": "nowhere.Own", "AutoConfig": "nowhere.C"}, r"nowhere\.Own"),
        ({"AutoModelForCausalLM": "own_code.No", "AutoConfig": "own_code.C"}, r"own_code\.No"),
        ({"AutoModelForCausalLM": "own_code.OwnForCausalLM"}, "names no AutoConfig"),
        ({"AutoModelForCausalLM": ["own_code.OwnForCausalLM"]}, "names no AutoModelForCausalLM"),
    ],
)
def test_code_that_cannot_be_imported_is_named(custom_model, code, message):
    change(custom_model.folder, auto_map=code)
    with pytest.raises(CheckpointError, match=rf"config\.json: auto_map: .*{message}"):
        session(custom_model.folder, trust_remote_code=True)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_a_tokenizer_with_code_names_the_flag_wherever_it_is_said(custom_model, file):
    (custom_model.folder / "tokenizer.json").unlink()
    table = json.loads((custom_model.folder / file).read_text())
    code = ["own_code.OwnTokenizer", None]
    table["auto_map"] = {**table.get("auto_map", {}), "AutoTokenizer": code}
    (custom_model.folder / file).write_text(json.dumps(table))
    if file == "config.json":
        (custom_model.folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer of .*--trust-remote-code"):
        load_tokenizer(custom_model.folder)
    assert not custom_model.touched.exists()
