"""Models of vectors and rewards: decoders that see whole texts (`is_causal: false`), and heads."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import modulm
from modulm.errors import UnsupportedError
from modulm.nn import read_config
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.oracles import oracle_of, write_tiny
from modulm.testing.session import Session
from modulm_layers import cos_sin

TEXTS = {0: list(range(3, 40)), 1: [7, 300, 11], 2: [5], 3: [9, 44, 100, 3]}
DECODERS = {
    "Qwen3ForCausalLM": {},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "MistralForCausalLM": {"sliding_window": 6},
    "DeepseekV3ForCausalLM": {"is_causal": False},
    "Gemma3ForCausalLM": {"use_bidirectional_attention": True},
}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4}


def states(folder, texts=TEXTS):
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return {r: model.eval()(torch.tensor([t])).last_hidden_state[0] for r, t in texts.items()}


@pytest.mark.parametrize("architecture", DECODERS)
def test_vectors_of_a_decoder_that_sees_whole_texts(architecture, tmp_path):
    settings = DECODERS[architecture] or {"is_causal": False}
    if architecture != "Gemma3ForCausalLM":
        settings = {**settings, "is_causal": False}
    folder = make_tiny(tmp_path, architecture, **settings)
    session = Session(folder, device="cpu", dtype="float32", runner="pooling")
    assert session.model.caches == ()
    expected = states(folder)
    for row, hidden in session.hidden(TEXTS).items():
        assert torch.allclose(hidden, expected[row], atol=1e-4)
        session.release(row)
        assert torch.allclose(session.hidden({row: TEXTS[row]})[row], expected[row], atol=1e-4)


def test_the_engine_embeds_with_it_and_does_not_generate(tmp_path):
    folder = make_tiny(tmp_path, "Qwen3ForCausalLM", is_causal=False)
    wanted = torch.nn.functional.normalize(states(folder)[0][-1], dim=-1)
    with modulm.LLM(str(folder), device="cpu", dtype="float32", runner="pooling") as llm:
        (output,) = llm.embed([TEXTS[0]], use_tqdm=False)
    assert np.allclose(output.outputs.embedding, wanted, atol=1e-4)
    with pytest.raises(UnsupportedError, match="is_causal: .* use --runner pooling"):
        Session(folder, device="cpu")


@pytest.mark.parametrize(
    ("name", "architecture", "task"),
    [
        ("ColBERTLfm2Model", "Lfm2ForCausalLM", "token_embed"),
        ("JinaEmbeddingsV5Model", "Qwen3ForCausalLM", "embed"),
        ("BertForMaskedLM", "BertForMaskedLM", "embed"),
        ("RobertaForMaskedLM", "RobertaForMaskedLM", "embed"),
    ],
)
def test_another_name_for_a_model_without_its_head(name, architecture, task, tmp_path):
    folder = make_tiny(tmp_path, architecture, **(SMALL if "Masked" in name else {}))
    expected = states(folder)
    file = folder / "config.json"
    table = json.loads(file.read_text())
    file.write_text(json.dumps({**table, "architectures": [name]}))
    session = Session(folder, device="cpu", dtype="float32")
    assert session.model.tasks[0] == task
    for row, hidden in session.hidden(TEXTS).items():
        assert torch.allclose(hidden, expected[row], atol=1e-4)


def test_a_bidirectional_llama_names_its_pooling():
    driver = manager.current().load("models", "LlamaBidirectionalModel")
    table = {key: value for key, value in driver.tiny().items() if key != "pooling"}
    with pytest.raises(modulm.errors.CheckpointError, match="pooling"):
        read_config(table, driver.config_type)


def test_splade_gives_the_maximum_over_the_tokens(tmp_path):
    driver = manager.current().load("models", "BertSpladeSparseEmbeddingModel")
    oracle: Any = oracle_of(driver)
    folder = write_tiny(driver, oracle, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    with torch.inference_mode():
        words, _ = oracle.outputs(config, load_file(folder / "model.safetensors"), TEXTS[0])
    with modulm.LLM(str(folder), device="cpu", dtype="float32") as llm:
        (output,) = llm.embed([TEXTS[0]], use_tqdm=False)
    assert np.allclose(output.outputs.embedding, words.amax(0), atol=1e-4)


def test_internlm2_rates_each_token(tmp_path):
    """A reward model is the decoder with one row for a head."""
    driver = manager.current().load("models", "InternLM2ForCausalLM")
    oracle = oracle_of(driver)
    folder = write_tiny(driver, oracle, tmp_path)
    config, file = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    weights = load_file(file)
    with torch.inference_mode():
        expected = oracle.logits(config, weights, TEXTS[0])[:, :1]
    weights["v_head.weight"] = weights.pop("output.weight")[:1].contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    table = {**config, "architectures": ["InternLM2ForRewardModel"]}
    (folder / "config.json").write_text(json.dumps(table))
    session = Session(folder, device="cpu", dtype="float32")
    with torch.inference_mode():
        rewards = session.model.logits(session.hidden({0: TEXTS[0]})[0])
    assert session.model.tasks == ("reward", "token_classify")
    assert torch.allclose(rewards, expected, atol=1e-4)


def test_telechat_trained_on_longer_texts_has_another_base():
    driver = manager.current().load("models", "TeleChat2ForCausalLM")
    table = {**driver.tiny(), "base_seqlen": 64, "training_seqlen": 128}
    config = read_config(table, driver.config_type)
    rope = config.rope()
    assert rope.theta == pytest.approx(10000 * 3 ** (16 / 14))
    assert rope.attention_factor == pytest.approx(1 + 0.1 * np.log(2))
    assert config.max_length == 128


def test_the_rotary_scaling_of_gte():
    """The authors' "ntk": the base grows by the factor, all angles shrink by factor^(2 / size)."""
    driver = manager.current().load("models", "GteNewModel")
    table = {**driver.tiny(), "model_type": "new", "rope_theta": 500.0}
    config = read_config(
        {**table, "rope_scaling": {"type": "ntk", "factor": 2.0}}, driver.config_type
    )
    angles = cos_sin(config.rope(), 2, 2, torch.device("cpu"))[1, :8].acos()
    expected = (1000.0 ** -(torch.arange(8) / 8)) / 2 ** (2 / 16)
    assert torch.allclose(angles, expected, atol=1e-3)
