"""Every installed model keeps the contract: the same kit that plugin authors run."""

from __future__ import annotations

import pytest
from samples import parametrize_sample

from modulm.plugins import manager
from modulm.testing.models import check_model

#: What runs a checkpoint's own code has no code to test here: test_remote_code.py brings some.
#: Models around other models have a kit of their own: test_images.py. What speaks: test_csm.py.
APART = {
    "transformers_remote",
    *(d.name for kind in ("media_families", "speakers") for d in manager.current().names(kind)),
}
#: Llama's blocks with settings of their own: test_registry.py compares them. Decoders with other
#: heads: test_bidirectional.py and test_sentence_transformers.py.
RELATIVES = {
    "BgeM3EmbeddingModel", "ColBERTLfm2Model", "InternLM2ForRewardModel", "JinaEmbeddingsV5Model",
    "JinaForRanking",
    "IQuestCoderForCausalLM", "InternLM3ForCausalLM", "InternLMForCausalLM", "TeleChat3ForCausalLM",
}  # fmt: skip


def once(declared):
    """One name of each driver: that of its class, if there are several."""
    named = sorted(declared, key=lambda d: d.target.endswith(f":{d.name}"))
    return sorted({d.target: d.name for d in named}.values())


ARCHITECTURES = [
    name for name in once(manager.current().names("models")) if name not in APART | RELATIVES
]


#: Have another family's layers with settings of their own: `make test` checks that family.
ALIKE = {
    "BailingMoeForCausalLM", "Gemma4UnifiedForCausalLM", "InternLM2VEForCausalLM",
    "PanguEmbeddedForCausalLM",
    "Param2MoEForCausalLM",
    "SarvamMLAForCausalLM", "SarvamMoEForCausalLM", "Step1ForCausalLM", "TeleFLMForCausalLM",
    "LlamaBidirectionalForSequenceClassification",
}  # fmt: skip
CASES = [
    pytest.param(name, marks=[pytest.mark.exhaustive] * (name in ALIKE)) for name in ARCHITECTURES
]


@parametrize_sample("architecture", CASES, every=10)
def test_contract(architecture):
    check_model(manager.current().load("models", architecture), attention_backend="sdpa")
