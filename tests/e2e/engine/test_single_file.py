"""A checkpoint that is one file, in a format that a loader brings, is served by its path alone."""

from __future__ import annotations

import json

import pytest

from modulm import LLM, SamplingParams
from modulm.errors import CheckpointError
from modulm.plugins import manager
from modulm.testing.bundles import BundleLoader, write_bundle
from modulm.testing.checkpoints import make_tiny

SETTINGS = {"dtype": "float32", "max_model_len": 128, "kernels": ["none"]}
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(autouse=True)
def offered():
    plugins = manager.PluginManager()
    plugins.register("loaders", "bundle", BundleLoader)
    with manager.using(plugins):
        yield


def test_a_file_with_everything_is_served(tmp_path):
    folder = make_tiny(tmp_path / "folder")
    table = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**table, "temperature": 0.25}))
    file = write_bundle(folder, tmp_path / "model")
    messages = [{"role": "user", "content": "The capital of France"}]
    found = []
    for path in (folder, file):
        with LLM(str(path), **SETTINGS) as llm:
            texts = llm.generate(["one two", "Hello! How are"], GREEDY, use_tqdm=False)
            (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)
            tokenizer = llm.get_tokenizer()
            found.append(
                (
                    [output.outputs[0].text for output in texts],
                    answer.prompt_token_ids,
                    answer.outputs[0].text,
                    llm.get_default_sampling_params(),
                    tokenizer.encode("The capital of France is Paris"),
                )
            )
    assert found[0] == found[1]
    assert found[0][3].temperature == 0.25
    assert len(found[0][1]) > 10, "the chat template was not used"


def test_a_file_that_nobody_reads(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"model\.bin: no weights that an installed loader"):
        LLM(str(tmp_path / "model.bin"), **SETTINGS)


def test_a_broken_bundle_is_named(tmp_path):
    (tmp_path / "model.bundle").write_bytes(b"nothing at all")
    with pytest.raises(CheckpointError, match=r"model\.bundle: not a bundle"):
        LLM(str(tmp_path / "model.bundle"), **SETTINGS)
