"""Decoders as classifiers by the logits of some tokens, and models that rate steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import modulm
from modulm import PoolingParams
from modulm.errors import CheckpointError, UnsupportedError
from modulm.testing.checkpoints import make_tiny

QUERY, DOCUMENTS = "What is it?", ["It is a cat.", "No", "The capital of France is Paris."]
RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["n", "y"],
    "is_original_qwen3_reranker": True,
}
TEMPLATE = (
    "<|im_start|>judge {{ instruction | default('by meaning') }}\n"
    "{{ (messages | selectattr('role', 'eq', 'query') | first).content }}\n"
    "{{ (messages | selectattr('role', 'eq', 'document') | first).content }}<|im_end|>"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("judge") / "model", "Qwen3ForCausalLM")


def open_llm(folder: Path, **flags: Any) -> modulm.LLM:
    return modulm.LLM(str(folder), **{"device": "cpu", "dtype": "float32", **flags})


def logits(folder: Path, ids: list[int], name: str = "Qwen3ForCausalLM") -> torch.Tensor:
    """[tokens, vocabulary]."""
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def test_a_reranker_by_two_tokens_behind_a_template(folder: Path) -> None:
    """Qwen3-Reranker: the probability of the second token against the first."""
    with open_llm(folder, hf_overrides=RERANKER) as llm:
        assert llm.info.tasks == ("classify", "token_classify", "score")
        tokenizer = llm.get_tokenizer()
        scores = llm.score(QUERY, DOCUMENTS, chat_template=TEMPLATE, use_tqdm=False)
        (other,) = llm.score(
            QUERY, "No", chat_template=TEMPLATE, use_tqdm=False,
            chat_template_kwargs={"instruction": "by sound"},
        )  # fmt: skip
        (classes,) = llm.classify([scores[0].prompt_token_ids], use_tqdm=False)
    no, yes = tokenizer.token_to_id("n"), tokenizer.token_to_id("y")
    for output, document in zip(scores, DOCUMENTS, strict=True):
        text = f"<|im_start|>judge by meaning\n{QUERY}\n{document}<|im_end|>"
        assert output.prompt_token_ids == tokenizer.encode(text)
        last = logits(folder, output.prompt_token_ids)[-1]
        expected = last[[no, yes]].softmax(-1)[1]
        assert output.outputs.score == pytest.approx(float(expected), abs=1e-4)
    assert classes.outputs.probs == pytest.approx([scores[0].outputs.score], abs=1e-6)
    assert "by sound" in tokenizer.decode(other.prompt_token_ids)


def test_what_a_document_says_stays_text(folder: Path) -> None:
    with open_llm(folder, hf_overrides=RERANKER) as llm:
        (output,) = llm.score(QUERY, "<|im_end|>", chat_template=TEMPLATE, use_tqdm=False)
        end = llm.get_tokenizer().token_to_id("<|im_end|>")
    assert output.prompt_token_ids.count(end) == 1


def test_a_document_that_is_too_long_is_cut_and_not_the_template(folder: Path) -> None:
    cut = PoolingParams(truncate_prompt_tokens=40)
    with open_llm(folder, hf_overrides=RERANKER) as llm:
        (output,) = llm.score(
            QUERY, "France is Paris. " * 40, chat_template=TEMPLATE, pooling_params=cut,
            use_tqdm=False,
        )  # fmt: skip
        ends = llm.get_tokenizer().encode("<|im_end|>")
    assert len(output.prompt_token_ids) <= 40
    assert output.prompt_token_ids[-len(ends) :] == ends


def test_one_token_without_a_template(folder: Path) -> None:
    """bge-reranker-v2-gemma's kind: the logit of one token, of both texts as one."""
    table = {"classifier_from_token": ["y"], "method": "no_post_processing"}
    with open_llm(folder, hf_overrides=table) as llm:
        (output,) = llm.score(QUERY, "No", use_tqdm=False)
        raw = PoolingParams(use_activation=False)
        (plain,) = llm.score(QUERY, "No", pooling_params=raw, use_tqdm=False)
        tokenizer = llm.get_tokenizer()
    assert output.prompt_token_ids == tokenizer.encode(QUERY + "No")
    expected = logits(folder, output.prompt_token_ids)[-1, tokenizer.token_to_id("y")]
    assert plain.outputs.score == pytest.approx(float(expected), abs=1e-4)
    assert output.outputs.score == pytest.approx(float(expected.sigmoid()), abs=1e-4)


def test_classes_by_several_tokens(folder: Path) -> None:
    table = {"classifier_from_token": ["a", "b", "c"], "method": "no_post_processing"}
    with open_llm(folder, hf_overrides=table) as llm:
        assert llm.info.tasks == ("classify", "token_classify")
        (output,) = llm.classify(QUERY, use_tqdm=False)
        ids = [llm.get_tokenizer().token_to_id(name) for name in "abc"]
    expected = logits(folder, output.prompt_token_ids)[-1][ids].softmax(-1)
    assert output.outputs.probs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"classifier_from_token": ["n", "y"]}, "method: .*from_2_way_softmax"),
        ({"classifier_from_token": ["n", "y"], "method": "best"}, "method: "),
        ({"classifier_from_token": ["y"], "method": "from_2_way_softmax"}, "requires two tokens"),
        ({"classifier_from_token": ["never!"], "method": "no_post_processing"}, "'never!' is no"),
    ],
)
def test_what_is_said_wrong_about_tokens(folder: Path, table: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_llm(folder, hf_overrides=table)


@pytest.mark.parametrize("false", [None, 70])
def test_the_logit_score_of_sentence_transformers(tmp_path: Path, false: int | None) -> None:
    folder = make_tiny(tmp_path / "model", "Qwen3ForCausalLM")
    kinds = {"": "Transformer", "1_LogitScore": "LogitScore"}
    modules = [{"type": f"sentence_transformers.x.{kind}", "path": p} for p, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    table = {"true_token_id": 90, "false_token_id": false}
    (folder / "1_LogitScore/config.json").write_text(json.dumps(table))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with open_llm(folder) as llm:
        (output,) = llm.score(QUERY, "No", use_tqdm=False)
    last = logits(folder, output.prompt_token_ids)[-1]
    score = last[90] if false is None else last[90] - last[false]
    assert output.outputs.score == pytest.approx(float(score.sigmoid()), abs=1e-4)
    assert 1 in output.prompt_token_ids


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("torch.nn.modules.linear.Identity", lambda x: x),
        ("torch.nn.modules.activation.Tanh", torch.tanh),
        ("torch.nn.modules.activation.Sigmoid", torch.sigmoid),
    ],
)
def test_the_activation_of_a_cross_encoder(tmp_path: Path, name: str, function: Any) -> None:
    one = {"id2label": {"0": "fits"}, "label2id": {"fits": 0}}
    trained = {"sentence_transformers": {"activation_fn": name}}
    changes = {**one, **trained, "type_vocab_size": 1}
    folder = make_tiny(tmp_path / "model", "RobertaForSequenceClassification", **changes)
    with open_llm(folder) as llm:
        (output,) = llm.score(QUERY, "No", use_tqdm=False)
    found = logits(folder, output.prompt_token_ids, "RobertaForSequenceClassification")
    assert output.outputs.score == pytest.approx(float(function(found)), abs=1e-4)


def test_an_activation_that_is_not_there_yet(tmp_path: Path) -> None:
    settings = {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Mish"}
    folder = make_tiny(tmp_path / "model", "BertForSequenceClassification", **settings)
    with pytest.raises(UnsupportedError, match="Mish: not supported yet"):
        open_llm(folder)


def test_scores_are_calibrated(folder: Path) -> None:
    table = {"classifier_from_token": ["y"], "method": "no_post_processing"}
    calibration = {"logit_mean": 0.5, "logit_sigma": 2.0}
    with open_llm(folder, hf_overrides=table, pooler_config=calibration) as llm:
        (output,) = llm.score(QUERY, "No", use_tqdm=False)
        column = llm.get_tokenizer().token_to_id("y")
    logit = logits(folder, output.prompt_token_ids)[-1, column]
    assert output.outputs.score == pytest.approx(float(((logit - 0.5) / 2).sigmoid()), abs=1e-4)


STEPS = [20, 31, 7, 40, 41, 7, 50, 7]


def test_steps_are_rated_by_two_tokens(folder: Path) -> None:
    """Math-Shepherd's kind: a decoder with its head, two candidate tokens, at each step's end."""
    table = {"step_tag_id": 7, "returned_token_ids": [90, 70]}
    with open_llm(folder, convert="reward", pooler_config=table) as llm:
        (steps,) = llm.reward([STEPS], use_tqdm=False)
        raw = PoolingParams(use_activation=False)
        (plain,) = llm.reward([STEPS], raw, use_tqdm=False)
    found = logits(folder, STEPS)[[2, 5, 7]][:, [90, 70]]
    assert steps.outputs.data == pytest.approx(found.softmax(-1).numpy(), abs=1e-4)
    assert plain.outputs.data == pytest.approx(found.numpy(), abs=1e-4)
    every = {**table, "tok_pooling_type": "ALL"}
    with open_llm(folder, convert="reward", pooler_config=every) as llm:
        (tokens,) = llm.reward([STEPS], use_tqdm=False)
    assert tokens.outputs.data.shape == (len(STEPS), 2)


def test_a_process_reward_model_rates_the_steps_of_its_token(tmp_path: Path) -> None:
    """Saved as Qwen2.5-Math-PRM is, whose tokenizer has <extra_0>."""
    from safetensors.torch import load_file, save_file

    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder = make_tiny(tmp_path / "model", "Qwen2Model", intermediate_size=96, **shape)
    file = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    score = {
        f"score.{layer}.{part}": torch.randn(*size, generator=generator)
        for layer, rows in ((0, 64), (2, 2))
        for part, size in (("weight", (rows, 64)), ("bias", (rows,)))
    }
    inner = {f"model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file({**inner, **score}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    changed = {**config, "architectures": ["Qwen2ForProcessRewardModel"]}
    (folder / "config.json").write_text(json.dumps(changed))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("<|im_end|>", "<extra_0>"))
    step = 2
    ids = [20, 21, step, 30, step]
    with open_llm(folder) as llm:
        assert llm.get_tokenizer().token_to_id("<extra_0>") == step
        (output,) = llm.reward([ids], use_tqdm=False)
    base = transformers.Qwen2Model(transformers.Qwen2Config(**config)).eval()
    base.load_state_dict({name[6:]: tensor for name, tensor in inner.items()})
    with torch.inference_mode():
        states = base(torch.tensor([ids])).last_hidden_state[0][[2, 4]]
    first = torch.relu(states @ score["score.0.weight"].T + score["score.0.bias"])
    expected = (first @ score["score.2.weight"].T + score["score.2.bias"]).softmax(-1)
    assert np.abs(output.outputs.data - expected.numpy()).max() < 1e-3
