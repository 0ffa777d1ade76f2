"""Adapters that PEFT saved give what PEFT gives, alone and in mixed batches."""

from __future__ import annotations

import warnings

import pytest
import torch
from samples import parametrize_sample

from modulm.testing.adapters import AdapterSession
from modulm.testing.checkpoints import make_tiny

PROMPT = [5, 77, 130, 9, 301, 42, 8]
EMBEDDINGS = {
    "GPT2LMHeadModel": "wte",
    "BloomForCausalLM": "word_embeddings",
    "GPTNeoXForCausalLM": "embed_in",
}
#: What of each family is adapted where its own fused layers and ours are cut differently.
FUSED = {
    "GPT2LMHeadModel": ["c_attn"],
    "BloomForCausalLM": ["query_key_value"],
    "GPTNeoXForCausalLM": ["query_key_value"],
    "Phi3ForCausalLM": ["qkv_proj", "gate_up_proj"],
}
#: Norms of each family, by the ends of their names; of others, all.
NORMS = {
    "GPT2LMHeadModel": ["ln_1", "ln_2", "ln_f"],
    "GPTNeoXForCausalLM": ["layernorm", "final_layer_norm"],
    "Gemma3ForCausalLM": ["layernorm"],
}
EXPERTS = ("MixtralForCausalLM", "OlmoeForCausalLM", "GptOssForCausalLM", "Qwen3MoeForCausalLM")
FAMILIES = (
    "LlamaForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel", "Phi3ForCausalLM",
    "BloomForCausalLM", "GPTNeoXForCausalLM", "Gemma3ForCausalLM", "FalconH1ForCausalLM", *EXPERTS,
)  # fmt: skip


def settings(family, kind):
    """LoraConfig's arguments for one of the kinds of adapters."""
    mamba = family == "FalconH1ForCausalLM"
    table = EMBEDDINGS.get(family, "embed_tokens")
    apart = ["q_proj", "v_proj", *([] if family in EXPERTS else ["gate_proj"])]
    return {
        "dense": {
            "target_modules": ["q_proj", "o_proj", "down_proj"] if mamba else "all-linear",
            "rank_pattern": {"o_proj": 2},
            "alpha_pattern": {"o_proj": 9, "c_proj": 5},
        },
        "fused": {"target_modules": FUSED.get(family, apart), "use_rslora": True},
        # The rule of Phi-4 multimodal's own adapters.
        "layers": {
            "target_modules": r".*model\.layers\.\d+\.(self_attn\.(qkv|o)|mlp\.(gate_up|down))_proj"
        },
        "experts": {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
        "embeddings": {"target_modules": [table, "lm_head"]},
        "regex": {"target_modules": r".*\.1\..*(down_proj|dense|c_proj|o_proj)"},
        "saved": {"target_modules": FUSED.get(family, ["k_proj"]), "modules_to_save": ["lm_head"]},
        "norms": {
            "target_modules": FUSED.get(family, ["k_proj"]),
            "modules_to_save": NORMS.get(family, ["norm"]),
        },
        "bias": {"target_modules": ["k_proj", "v_proj"], "bias": "all"},
        "lora_bias": {"target_modules": ["k_proj", "q_proj", "v_proj"], "lora_bias": True},
        "dora": {
            "target_modules": [*FUSED.get(family, ["k_proj", "o_proj"]), table],
            "use_dora": True,
        },
    }[kind]


def save_adapter(model, folder, seed=0, **settings):
    """Save an adapter of random weights with PEFT: folder -> PEFT's logits of a prompt."""
    import peft

    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 6, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **settings))
        for name, parameter in wrapped.named_parameters():
            if not parameter.requires_grad:
                continue
            if "magnitude" in name:
                parameter.data *= 1 + 0.3 * torch.rand_like(parameter)
            elif "lora_" in name:
                parameter.data = 0.2 * torch.randn_like(parameter)
            else:
                parameter.data += 0.1 * torch.randn_like(parameter)
        wrapped.save_pretrained(folder)
    return wrapped


@torch.inference_mode()
def logprobs(model, prompt=PROMPT):
    return model.eval()(torch.tensor([prompt])).logits[0].float().log_softmax(-1)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Family -> (folder, transformers' model factory, a session with slots)."""
    models = {}

    def get(family):
        if family not in models:
            folder = make_tiny(tmp_path_factory.mktemp("lora") / family, family)
            models[family] = folder, AdapterSession(folder, max_loras=3, max_lora_rank=8)
        return models[family]

    return get


def original(folder):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


CASES = [
    (family, kind)
    for family in FAMILIES
    for kind in ("dense", "fused", "embeddings", "dora", "regex", "saved")
] + [(family, "experts") for family in EXPERTS] + [
    ("Phi4MultimodalForCausalLM", "layers"),
    ("Qwen2ForCausalLM", "bias"), ("Qwen2ForCausalLM", "lora_bias"),
    ("GPT2LMHeadModel", "norms"), ("Gemma3ForCausalLM", "norms"), ("GPTNeoXForCausalLM", "norms"),
    ("LlamaForCausalLM", "norms"),
]  # fmt: skip


@parametrize_sample(("family", "kind"), CASES, every=16)
def test_logits_are_those_of_peft(bases, tmp_path, family, kind):
    folder, session = bases(family)
    model = original(folder)
    base = logprobs(model)
    expected = logprobs(save_adapter(model, tmp_path, **settings(family, kind)))
    session.fill(1, "a", tmp_path)
    adapted, plain = session.run({0: PROMPT, 1: PROMPT}, {0: 1, 1: 0}).values()
    torch.testing.assert_close(adapted, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plain, base, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(adapted, plain, atol=1e-2)
