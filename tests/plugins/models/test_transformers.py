"""The bridge: architectures that run with transformers' code on our memory, and those refused.

docs/transformers.md lists both; a test keeps the page and this file together.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from samples import parametrize_sample
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from modulm.config import EngineConfig
from modulm.errors import CheckpointError, UnsupportedError
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.models import check_equals_transformers
from modulm.testing.session import Session
from modulm_command_explain import text as explain
from modulm_transformers.attention import _attend

PAGE = Path(__file__).resolve().parents[3] / "docs/transformers.md"

NOT_TRIED = "## Not tried"

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
#: Every spelling of the sizes of windows and experts; a model takes those that it knows.
SIZES = {
    "head_dim": 16,
    "sliding_window": 12,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LATENT = {**SIZES, "num_key_value_heads": 4, "head_dim": 8}
#: Have a native plugin as well.
NATIVE = (
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM",
    "ExaoneMoeForCausalLM",
    "FlexOlmoForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "HYV3ForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "LlamaForCausalLM",
    "LongcatFlashForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM",
    "MinistralForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoForCausalLM",
    "OlmoeForCausalLM",
    "PersimmonForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "PhimoeForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
    "YoutuForCausalLM",
)
#: Of those `make test` compares these, one of each kind of attention and block; the others with
#: `--everything`.
KINDS = {
    "DeepseekV3ForCausalLM",
    "GPT2LMHeadModel",
    "Gemma2ForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MixtralForCausalLM",
}
#: Take the sizes above.
WITH_SIZES = (
    "AriaTextForCausalLM",
    "BeamForCausalLM",
    "BitNetForCausalLM",
    "Cohere2MoeForCausalLM",
    "CwmForCausalLM",
    "FlintForCausalLM",
    "GraniteMoeSWAForCausalLM",
    "GraniteSWAForCausalLM",
    "HyperCLOVAXForCausalLM",
    "Jais2ForCausalLM",
    "JetMoeForCausalLM",
    "Kolibri1ForCausalLM",
    "LagunaForCausalLM",
    "MellumForCausalLM",
    "MiniMaxM3VLForCausalLM",
    "ModernBertDecoderForCausalLM",
    "NanoChatForCausalLM",
    "SolarOpenForCausalLM",
    "VaultGemmaForCausalLM",
)
#: Latent attention, as transformers computes it: keys and values are expanded before they are kept.
WITH_LATENT = (
    "AXK1ForCausalLM",
    "AfmoeForCausalLM",
    "MiniCPM3ForCausalLM",
)
#: Take none of them.
PLAIN: tuple[str, ...] = ()

REFUSED = {
    "BertLMHeadModel": "uses bidirectional attention",
    "DeepseekV32ForCausalLM": "layers of kind indexed_attention",
    "DiffLlamaForCausalLM": "attends twice in a step",
    "DogeForCausalLM": "builds its own mask",
    "GlmMoeDsaForCausalLM": "layers of kind indexed_attention",
    "Llama4ForCausalLM": "layers of kind chunked_attention",
    "MiniMaxForCausalLM": "layers of kind linear_attention",
    "MptForCausalLM": "cannot be replaced by ours",
    "NemotronForCausalLM": "drops the arguments meant for attention",
    "OlmoHybridForCausalLM": "cannot be replaced by ours",
    "RecurrentGemmaForCausalLM": "caches other than keys and values",
    "Zamba2ForCausalLM": "cannot be replaced by ours",
    "StableLmForCausalLM": "cannot be replaced by ours",
}
#: Sizes that only one architecture has.
OWN = {"RecurrentGemmaForCausalLM": {"block_types": ["recurrent", "attention"]}}
REFUSED_BUT_NATIVE = (
    "DiffLlamaForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Llama4ForCausalLM",
    "MiniMaxForCausalLM",
    "MptForCausalLM",
    "NemotronForCausalLM",
    "OlmoHybridForCausalLM",
    "StableLmForCausalLM",
    "Zamba2ForCausalLM",
)


def write(path, architecture):
    if architecture in NATIVE:
        return make_tiny(path, architecture)
    settings = (
        LATENT if architecture in WITH_LATENT else SIZES if architecture in WITH_SIZES else {}
    )
    return make_tiny(path, architecture, **{**SMALL, **settings})


def pytest_generate_tests(metafunc):
    if "bridged" in metafunc.fixturenames:
        everything = metafunc.config.getoption("everything")
        others = (*WITH_LATENT, *WITH_SIZES, *PLAIN)
        names = (*NATIVE, *others) if everything else (*KINDS, *others[::5])
        metafunc.parametrize("bridged", sorted(names))


def test_runs_as_in_transformers(bridged, tmp_path):
    folder = write(tmp_path, bridged)
    check_equals_transformers(folder, steps=8, model_impl="transformers", attention_backend="sdpa")


@parametrize_sample("architecture", REFUSED, every=7)
def test_what_cannot_be_bridged_says_why(architecture, tmp_path):
    settings = {} if architecture in REFUSED_BUT_NATIVE else {**SMALL, **OWN.get(architecture, {})}
    folder = make_tiny(tmp_path, architecture, **settings)
    with pytest.raises(UnsupportedError, match=REFUSED[architecture]):
        Session(folder, model_impl="transformers", attention_backend="sdpa")


def test_it_stands_in_where_no_plugin_offers_the_architecture(tmp_path):
    folder = write(tmp_path, "NanoChatForCausalLM")
    session = Session(folder, device="cpu", attention_backend="sdpa")
    decision = next(d for d in session.loaded.decisions if d.subject == "model")
    assert decision.winner == "transformers"
    assert "no plugin provides NanoChatForCausalLM" in explain.render([decision])


def test_a_native_plugin_comes_first(tmp_path):
    folder = make_tiny(tmp_path, "LlamaForCausalLM")
    session = Session(folder, device="cpu", attention_backend="sdpa")
    assert session.loaded.decisions[0].winner == "LlamaForCausalLM"


def test_what_is_called_native_is():
    provided = {declared.name for declared in manager.current().names("models")}
    assert provided >= {*NATIVE, *REFUSED_BUT_NATIVE}
    assert not provided & ({*WITH_LATENT, *WITH_SIZES, *PLAIN, *REFUSED} - {*REFUSED_BUT_NATIVE})


def test_every_architecture_of_transformers_is_on_the_page_or_native():
    """Those under "Not tried" are the rest of the library's mappings for generation."""
    mappings = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    entries = [entry for mapping in mappings for entry in mapping.values()]
    known = {n for entry in entries for n in ((entry,) if isinstance(entry, str) else entry)}
    before, _, after = PAGE.read_text(encoding="utf-8").partition(NOT_TRIED)
    untried, _, after = after.partition("\n## ")
    listed = set(re.findall(r"`(\w+)`", before + after))
    native = {declared.name for declared in manager.current().names("models")}
    assert set(re.findall(r"`(\w+)`", untried)) == known - listed - native


def test_the_page_lists_what_is_tested():
    text = PAGE.read_text(encoding="utf-8").partition(NOT_TRIED)[0]
    listed = set(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", text))
    assert listed == {*NATIVE, *WITH_LATENT, *WITH_SIZES, *PLAIN, *REFUSED}


def test_the_name_of_the_driver_is_a_value_of_the_flag():
    config = EngineConfig.from_keywords(model_impl="transformers")
    assert manager.current().find("models", config.model.model_impl).distribution == (
        "modulm-transformers"
    )


class Attends(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"indices": torch.zeros(1, 1)}, "attention argument indices"),
        ({"position_bias": torch.zeros(1, 1)}, "attention argument position_bias"),
        ({"is_causal": False}, "uses bidirectional attention"),
    ],
)
def test_what_attention_is_handed_and_cannot_obey_is_refused(more, message):
    state = torch.zeros(1, 1, 2, 4)
    with pytest.raises(UnsupportedError, match=message):
        _attend(Attends(), state, state, state, None, modulm=object(), **more)


def test_an_error_of_the_library_s_own_code_is_told_as_what_it_is(tmp_path, monkeypatch):
    folder = make_tiny(tmp_path, "LlamaForCausalLM")

    def fail(self, *args, **keywords):
        raise IndexError("tuple index out of range")

    monkeypatch.setattr("transformers.LlamaModel.forward", fail)
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM: .* IndexError: tuple index"):
        Session(folder, model_impl="transformers", attention_backend="sdpa")


def test_a_decoder_that_is_told_to_see_both_ways_is_refused(tmp_path):
    """`is_causal: false` is what decoders that were made embedders have; transformers obeys."""
    folder = make_tiny(tmp_path, "LlamaForCausalLM", is_causal=False)
    for implementation in ("transformers", "auto"):
        with pytest.raises((CheckpointError, UnsupportedError), match="is_causal: "):
            Session(folder, model_impl=implementation, attention_backend="sdpa")
