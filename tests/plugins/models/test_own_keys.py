"""Keys of config.json of families that transformers does not have: as in the oracle, or refused.

As test_keys.py, for families whose driver names an oracle: another model of transformers with the
same mathematics (`modulm_layers.testing.Converted`), or the published equations in plain torch. A
key that the oracle does not pass on counts as wrong where it changes our numbers: then the oracle
must learn it, or `RIGHT` says why it does not.
"""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace

import attrs
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests.plugins.models.test_keys import APART, PUBLIC, TOKENS, TOLERANCE, VOCABULARY, changes

from modulm.errors import ModulmError
from modulm.nn import read_config
from modulm.plugins import manager
from modulm.testing.oracles import oracle_of
from modulm.testing.session import Session

#: By name: loading each model's module would slow down every process that collects tests.
ARCHITECTURES = [
    "AliceAIForCausalLM", "ArcticForCausalLM", "BaiChuanForCausalLM", "BaichuanForCausalLM",
    "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "BailingMoeV2_5ForCausalLM",
    "BertSpladeSparseEmbeddingModel", "ChatGLMForConditionalGeneration", "DeciLMForCausalLM",
    "DeepseekForCausalLM", "DeepseekV3BidirectionalModel", "DomynEdgeForCausalLM",
    "DoryForCausalLM", "ExaoneForCausalLM", "Fairseq2LlamaForCausalLM", "Grok1ForCausalLM",
    "IQuestLoopCoderForCausalLM", "InternLM2ForCausalLM", "InternLM2ForRewardModel",
    "InternLM2VEForCausalLM", "JAISLMHeadModel", "K2HorizonForCausalLM", "Lfm2BidirectionalModel",
    "LlamaBidirectionalForSequenceClassification", "LlamaBidirectionalModel",
    "LongcatFlashNgramForCausalLM", "MiMoForCausalLM", "MiniCPMForCausalLM", "MotifForCausalLM",
    "MuseGlimmerForCausalLM", "NanbeigeForCausalLM", "NemotronHPuzzleForCausalLM",
    "OrionForCausalLM", "OuroForCausalLM", "PanguEmbeddedForCausalLM", "PanguUltraMoEForCausalLM",
    "Param2MoEForCausalLM", "Plamo3ForCausalLM", "QWenLMHeadModel", "Rnj1ForCausalLM",
    "SarvamMLAForCausalLM", "SarvamMoEForCausalLM", "SolarForCausalLM", "Step1ForCausalLM",
    "Step3TextForCausalLM", "Step3p5ForCausalLM", "TeleChat2ForCausalLM", "TeleFLMForCausalLM",
    "VoyageQwen3BidirectionalEmbedModel",
]  # fmt: skip
#: Keys that the base class of decoders reads, and that no published code of these families has.
FOREIGN = frozenset({"mlp_bias", "sliding_window"})
#: Keys that ours and the oracle read differently, and why that is right.
RIGHT = {
    "BaichuanForCausalLM.tie_word_embeddings": "the head's norms would be the embedding's, too",
    "DeepseekForCausalLM.norm_topk_prob": "DeepSeek's own code obeys, transformers' for OCR 2 not",
    "LongcatFlashNgramForCausalLM.mla_scale_kv_lora": "Meituan's files have it; transformers not",
    "LongcatFlashNgramForCausalLM.mla_scale_q_lora": "Meituan's files have it; transformers not",
    "Rnj1ForCausalLM.attn_logit_softcapping": "transformers' Gemma 3 has the key and ignores it",
    "TeleChat2ForCausalLM.training_seqlen": "the maximum length, which the text exceeds",
    "NemotronHPuzzleForCausalLM.tie_word_embeddings": "transformers' Nemotron-H never ties",
}


@cache
def family(architecture):
    """The classes of an architecture, its tiny config.json and its numbers."""
    driver = manager.current().load("models", architecture)
    table = {"vocab_size": VOCABULARY, "pad_token_id": 0, **driver.tiny()}
    return SimpleNamespace(
        name=architecture,
        driver=driver,
        oracle=oracle_of(driver),
        table=table,
        config=transformers.PreTrainedConfig,
        resolved=read_config(table, driver.config_type),
    )


def expected(case, table):
    """The weights of a file and the oracle's numbers, None if it has none for the file."""
    try:
        torch.manual_seed(0)
        weights = case.oracle.weights(table)
        with torch.inference_mode():
            if hasattr(case.oracle, "outputs"):
                numbers = case.oracle.outputs(table, weights, TOKENS)[0]
            else:
                numbers = case.oracle.logits(table, weights, TOKENS)
    except Exception:
        return None
    return (weights, numbers.float()) if numbers.isfinite().all() else None


def ours(case, folder):
    """What modulm makes of the files in a folder. Raises ModulmError."""
    session = Session(
        folder, device="cpu", dtype="float32", attention_backend="sdpa", kernels=["none"], rows=1
    )
    hidden = session.hidden({0: TOKENS})[0]
    if hasattr(case.oracle, "outputs"):
        return hidden.float()
    with torch.inference_mode():
        return session.model.logits(hidden).float()


def check(case, key, table, folder):
    """What is wrong with modulm's numbers, or nothing; "illegal" if the oracle has none."""
    reference = expected(case, table)
    if reference is None:
        return "illegal"
    weights, numbers = reference
    (folder / "config.json").write_text(json.dumps(table))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    try:
        found = ours(case, folder)
    except ModulmError as error:
        mine = {field.name for field in attrs.fields(case.driver.config_type)}
        text = str(error)
        named = any(
            f"{k}:" in text or f"{k}[" in text or f"'{k}'" in text for k in {key, *mine, *table}
        )
        # Ours asks for weights by a key that the oracle has nothing for.
        named = named or "the weights do not fit the model; " in text
        return None if named else f"refused without its name: {text}"
    if found.shape != numbers.shape:
        return f"{tuple(found.shape)} numbers, not {tuple(numbers.shape)}"
    worst = (found - numbers).abs().max().item()
    bound = TOLERANCE * max(1.0, numbers.abs().max().item())
    return None if worst <= bound else f"other numbers: {worst:.2g} apart"


def keys(case):
    """Every key that modulm knows for the architecture, but those set apart."""
    aliases = getattr(case.driver.config_type, "ALIASES", {})
    mine = {field.name for field in attrs.fields(case.driver.config_type)} - set(aliases.values())
    return sorted((mine | set(aliases) | set(case.table)) - APART - FOREIGN)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_key_gives_the_oracles_numbers_or_is_refused_by_name(architecture, tmp_path):
    case = family(architecture)
    assert check(case, "", case.table, tmp_path) is None
    wrong, tried = [], 0
    for key in keys(case):
        if "dropout" in key or f"{architecture}.{key}" in RIGHT:
            continue
        for table in changes(case, key):
            problem = check(case, key, table, tmp_path)
            if problem == "illegal":
                continue
            wrong += [f"{key} = {table[key]!r}: {problem}"] if problem else []
            tried += 1
            break
    assert not wrong, "\n".join(wrong)
    assert tried > 8, f"only {tried} files were legal"


@pytest.mark.exhaustive
def test_every_family_with_an_oracle_is_tried():
    """Names of one driver class are tried once."""
    plugins, drivers = manager.current(), {}
    for declared in plugins.names("models"):
        if declared.name not in PUBLIC:
            driver = plugins.load("models", declared.name)
            if driver.oracle:
                drivers.setdefault(driver, declared.name)
    assert sorted(drivers.values()) == ARCHITECTURES
