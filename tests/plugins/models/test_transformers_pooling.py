"""The bridge for pooling: encoders, classifiers and bare decoders with transformers' own code.

docs/transformers.md lists them; a test keeps the page and this file together.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
import transformers
from samples import parametrize_sample

from modulm import LLM
from modulm.errors import UnsupportedError
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session

PAGE = Path(__file__).resolve().parents[3] / "docs/transformers.md"
SETTINGS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "label2id": {"a": 0, "b": 1, "c": 2},
}
FLAGS = {"device": "cpu", "dtype": "float32", "model_impl": "transformers"}
LENGTHS = (37, 5, 2, 5)
#: The first, the last token or the mean, as transformers' own head takes it.
CLASSIFIERS = {
    "BigBirdForSequenceClassification": "CLS",
    "CamembertForSequenceClassification": "CLS",
    "ConvBertForSequenceClassification": "CLS",
    "Data2VecTextForSequenceClassification": "CLS",
    "DebertaForSequenceClassification": "CLS",
    "DebertaV2ForSequenceClassification": "CLS",
    "DistilBertForSequenceClassification": "CLS",
    "ElectraForSequenceClassification": "CLS",
    "ErnieForSequenceClassification": "CLS",
    "EsmForSequenceClassification": "CLS",
    "FNetForSequenceClassification": "CLS",
    "GPT2ForSequenceClassification": "LAST",
    "IBertForSequenceClassification": "CLS",
    "JinaEmbeddingsV3ForSequenceClassification": "CLS",
    "LukeForSequenceClassification": "CLS",
    "MPNetForSequenceClassification": "CLS",
    "MegatronBertForSequenceClassification": "CLS",
    "NomicBertForSequenceClassification": "CLS",
    "NystromformerForSequenceClassification": "CLS",
    "RemBertForSequenceClassification": "CLS",
    "RoCBertForSequenceClassification": "CLS",
    "RoFormerForSequenceClassification": "CLS",
    "RobertaPreLayerNormForSequenceClassification": "CLS",
    "ModernBertForSequenceClassification": "MEAN",
    "SmolLM3ForSequenceClassification": "LAST",
}
TOKENS = (
    "AlbertForTokenClassification",
    "DebertaV2ForTokenClassification",
    "ErnieForTokenClassification",
    "OpenAIPrivacyFilterForTokenClassification",
)
EMBEDDERS = {
    "AlbertModel": "CLS",
    "ErnieModel": "CLS",
    "EmbeddingGemma2Model": "CLS",
    "FlaubertModel": "CLS",
    "NomicBertModel": "CLS",
    "SmolLM3Model": "LAST",
}
REFUSED = {
    "AlbertForSequenceClassification": "a head that reads anything",
    "EuroBertForSequenceClassification": "a head that reads anything",
}


def classes(model, hidden, pooling):
    ways = {"CLS": hidden[:1], "LAST": hidden[-1:], "MEAN": hidden.mean(0, keepdim=True)}
    with torch.inference_mode():
        return model.logits(ways[pooling] if pooling else hidden)


@parametrize_sample("architecture", [*CLASSIFIERS, *TOKENS, *EMBEDDERS], every=6)
def test_runs_as_in_transformers(architecture, tmp_path):
    changes = {"classifier_pooling": "mean"} if CLASSIFIERS.get(architecture) == "MEAN" else {}
    session = Session(make_tiny(tmp_path, architecture, **SETTINGS, **changes), **FLAGS)
    reference = (
        getattr(transformers, architecture).from_pretrained(tmp_path, dtype=torch.float32).eval()
    )
    base = getattr(reference, reference.base_model_prefix, reference)
    pooling = {**CLASSIFIERS, **EMBEDDERS}.get(architecture)
    assert session.model.pooling == (pooling or session.model.pooling)
    rng = random.Random(1)
    rows = {row: [rng.randrange(5, 500) for _ in range(n)] for row, n in enumerate(LENGTHS)}
    hidden = session.hidden(rows)
    for row, tokens in rows.items():
        with torch.inference_mode():
            states = base(torch.tensor([tokens]))[0][0]
            head = None if architecture in EMBEDDERS else reference(torch.tensor([tokens])).logits
        torch.testing.assert_close(hidden[row], states, atol=1e-4, rtol=1e-4)
        if head is not None:
            logits = classes(session.model, hidden[row], pooling)
            torch.testing.assert_close(logits, head.view(logits.shape), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_cannot_be_split_says_why(architecture, tmp_path):
    folder = make_tiny(tmp_path, architecture, **SETTINGS)
    with pytest.raises(UnsupportedError, match=REFUSED[architecture]):
        Session(folder, **FLAGS)


def test_it_stands_in_where_no_plugin_has_the_encoder(tmp_path):
    folder = make_tiny(tmp_path, "ElectraForSequenceClassification", **SETTINGS)
    with LLM(str(folder), device="cpu", dtype="float32") as llm:
        (output,) = llm.classify("one two three", use_tqdm=False)
    reference = transformers.ElectraForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([output.prompt_token_ids])).logits[0].softmax(-1)
    assert output.outputs.probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_page_lists_what_is_tested():
    text = PAGE.read_text(encoding="utf-8").partition("## Pooling")[2]
    endings = "(?<!LMHead)Model|ForSequenceClassification|ForTokenClassification"
    listed = set(re.findall(rf"`(\w+(?:{endings}))`", text))
    assert listed == {*CLASSIFIERS, *TOKENS, *EMBEDDERS, *REFUSED}
