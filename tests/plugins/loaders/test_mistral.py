"""params.json and consolidated files: the numbers of the same model in the form of Hugging Face."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from modulm import LLM, SamplingParams
from modulm.errors import ModulmError
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session
from modulm_layers.testing import split_experts
from modulm_loader_mistral.params import configuration

TOKENS = [5, 77, 130, 9, 301, 42, 8, 250, 12, 400, 33, 60, 71, 15, 2, 99]
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta": 32.0, "alpha": 1.0}
ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip

#: What Mistral calls a tensor of ours, by the end of its path.
NAMES = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "block_sparse_moe.gate": "feed_forward.gate",
    "self_attn.q_a_proj": "attention.wq_a", "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.q_a_layernorm": "attention.q_a_norm", "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm", "mlp.gate": "gate",
    "mlp.shared_experts.gate_proj": "shared_experts.w1",
    "mlp.shared_experts.down_proj": "shared_experts.w2",
    "mlp.shared_experts.up_proj": "shared_experts.w3",
}  # fmt: skip


def theirs(name):
    path, _, last = name.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", path)
    inside = match[2] if match else path
    expert = re.fullmatch(r"block_sparse_moe\.experts\.(\d+)\.(w.)", inside)
    theirs_in_layer = NAMES.get(inside)
    if expert:
        theirs_in_layer = f"feed_forward.experts.{expert[1]}.{expert[2]}"
    latent = re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)", inside)
    if latent:
        part = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[latent[2]]
        theirs_in_layer = f"experts.{latent[1]}.{part}"
    last = {"weight_scale": "qscale_weight", "input_scale": "qscale_act"}.get(last, last)
    return f"layers.{match[1]}.{theirs_in_layer}.{last}" if match else f"{theirs_in_layer}.{last}"


def unturned(tensor, heads):
    """Rows in the order of Mistral: the two numbers that are turned together, side by side."""
    size = len(tensor) // heads
    return tensor.view(heads, 2, size // 2, -1).transpose(1, 2).reshape(tensor.shape)


def publish(plain, out, **params):
    """The checkpoint `plain` as Mistral would have it."""
    config = json.loads((plain / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    out.mkdir()
    stored = {}
    for name, tensor in split_experts(load_file(plain / "model.safetensors")).items():
        part = name.split(".")[-2]
        turned = part in heads and tensor.dim() > 1
        stored[theirs(name)] = unturned(tensor, heads[part]) if turned else tensor
    save_file({name: tensor.contiguous() for name, tensor in stored.items()},
              out / "consolidated.safetensors")  # fmt: skip
    table = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"], "n_kv_heads": config["num_key_value_heads"],
        "head_dim": config.get("head_dim"), "hidden_dim": config["intermediate_size"],
        "vocab_size": config["vocab_size"], "norm_eps": config["rms_norm_eps"],
        "rope_theta": AutoConfig.from_pretrained(plain).rope_parameters["rope_theta"],
        "max_position_embeddings": config["max_position_embeddings"],
        "tied_embeddings": config["tie_word_embeddings"], **params,
    }  # fmt: skip
    (out / "params.json").write_text(json.dumps(table))
    return out


#: The sizes of the tiny Mistral 4.
LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "moe": {"num_experts": 8, "num_shared_experts": 2, "num_experts_per_tok": 3,
            "expert_hidden_dim": 32, "first_k_dense_replace": 1, "routed_scale": 1.5,
            "num_expert_groups": 1, "num_expert_groups_per_tok": 1, "route_every_n": 1},
}  # fmt: skip
#: Architecture, its settings, and what params.json has beside sizes.
CASES = {
    "mistral": ("MistralForCausalLM", {"sliding_window": 8}, {"sliding_window": 8}),
    "tied": (
        "MistralForCausalLM", {"sliding_window": None, "tie_word_embeddings": True}, {},
    ),
    "windows by layer": (
        "MinistralForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 8,
         "layer_types": ["full_attention", "sliding_attention"] * 2},
        {"sliding_window": [None, 8]},
    ),
    "yarn that scales": (
        "MistralForCausalLM",
        {"sliding_window": None, "rope_parameters": {k: ROPE[k] for k in ROPE if "msc" not in k}},
        {"yarn": YARN},
    ),
    "growing queries": (
        "Ministral3ForCausalLM",
        {"sliding_window": None, "rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.3}},
        {"yarn": {**YARN, "apply_scale": False},
         "llama_4_scaling": {"beta": 0.3, "original_max_position_embeddings": 16}},
    ),
    "latent attention, shared experts": (
        "Mistral4ForCausalLM",
        {"rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.3}, "n_group": 1, "topk_group": 1},
        {"yarn": {**YARN, "apply_scale": False}, **LATENT,
         "llama_4_scaling": {"beta": 0.3, "original_max_position_embeddings": 16}},
    ),
    "experts": (
        "MixtralForCausalLM", {"head_dim": 16, "num_local_experts": 4},
        {"moe": {"num_experts": 4, "num_experts_per_tok": 2}},
    ),
}  # fmt: skip


def run(folder, **flags):
    return Session(folder, device="cpu", dtype="float32", block_size=16, **flags).step({0: TOKENS})


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_transformers(tmp_path, name):
    architecture, settings, params = CASES[name]
    plain = make_tiny(tmp_path / "plain", architecture, **settings)
    out = publish(plain, tmp_path / "out", **params)
    oracle = getattr(transformers, architecture).from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        wanted = oracle(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    torch.testing.assert_close(run(out)[0], wanted, rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistral") / "plain"
    return make_tiny(folder, "MistralForCausalLM", sliding_window=None, vocab_size=512)


@pytest.fixture
def native(plain, tmp_path):
    return publish(plain, tmp_path / "own")


def test_beside_config_json_by_name_alone(plain, native):
    """Repositories have both forms; the weights of either are the same."""
    expected = run(plain)[0]
    for file in plain.iterdir():
        shutil.copy2(file, native / file.name)
    assert torch.equal(run(native)[0], expected)
    (native / "model.safetensors").unlink()
    assert torch.equal(run(native, load_format="mistral")[0], expected)


def test_eight_bits_with_a_scale_for_each_layer(plain, native, tmp_path):
    """Weights with `qscale_weight`, as Mistral's own fp8 files have them."""
    stored = load_file(native / "consolidated.safetensors")
    dequantized = load_file(plain / "model.safetensors")
    coded = {}
    for name, tensor in stored.items():
        if ".attention." not in name and ".feed_forward." not in name:
            coded[name] = tensor
            continue
        scale = tensor.float().abs().amax() / 448
        coded[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        path = name.removesuffix("weight")
        coded |= {f"{path}qscale_weight": scale, f"{path}qscale_act": torch.tensor(1.0)}
    for name, tensor in dequantized.items():
        if theirs(name).removesuffix("weight") + "qscale_weight" in coded:
            scale = coded[theirs(name).removesuffix("weight") + "qscale_weight"]
            dequantized[name] = (tensor.float() / scale).to(torch.float8_e4m3fn).float() * scale
    save_file(coded, native / "consolidated.safetensors")
    params = json.loads((native / "params.json").read_text())
    params["quantization"] = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    (native / "params.json").write_text(json.dumps(params))
    exact = shutil.copytree(plain, tmp_path / "exact")
    save_file(dequantized, exact / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(run(native)[0], run(exact)[0], rtol=0, atol=1e-4)


def test_what_sees_pictures_is_left_out(plain, native, caplog):
    stored = load_file(native / "consolidated.safetensors")
    stored["vision_encoder.patch_conv.weight"] = torch.zeros(4, 4)
    save_file(stored, native / "consolidated.safetensors")
    assert torch.equal(run(native)[0], run(plain)[0])
    assert "skipped 1 tensors of the vision encoder" in caplog.text


def test_two_files_and_their_index(plain, native):
    stored = load_file(native / "consolidated.safetensors")
    (native / "consolidated.safetensors").unlink()
    files = [f"consolidated-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    where = {name: files[i % 2] for i, name in enumerate(stored)}
    for file in files:
        save_file({n: t for n, t in stored.items() if where[n] == file}, native / file)
    (native / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert torch.equal(run(native)[0], run(plain)[0])


def tekken(folder):
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]",
               "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]",
               "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
               "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]  # fmt: skip
    byte_tokens = [bytes([byte]) for byte in range(256)]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate(byte_tokens)
    ]
    config = {"pattern": r"[^\s]+|\s+", "num_vocab_tokens": 256, "default_vocab_size": 296,
              "default_num_special_tokens": 40, "version": "v7"}  # fmt: skip
    table = {
        "config": config, "vocab": vocab, "version": 1,
        "special_tokens": [{"rank": r, "token_str": t, "is_control": True}
                           for r, t in enumerate(special)],
    }  # fmt: skip
    (folder / "tekken.json").write_text(json.dumps(table))


def test_a_conversation_with_nothing_but_mistrals_files(native):
    tekken(native)
    assert {file.name for file in native.iterdir()} == {
        "params.json", "consolidated.safetensors", "tekken.json"
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(native), dtype="float32", max_model_len=128) as llm:
        (answer,) = llm.chat([{"role": "user", "content": "hi"}], params, use_tqdm=False)
    assert answer.prompt_token_ids[:2] == [1, 3]  # <s>[INST]
    assert len(answer.outputs[0].token_ids) == 4


def test_a_conversation_with_an_image(tmp_path):
    """Pixtral's encoder with merged squares, against transformers' class of the same weights."""
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 4,
    }  # fmt: skip
    text = manager.current().load("models", "MistralForCausalLM").tiny()
    text |= {"model_type": "mistral", "sliding_window": None, "rms_norm_eps": 1e-5}
    torch.manual_seed(0)
    oracle = Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config=text,
            vision_config={**sizes, "model_type": "pixtral", "head_dim": 16},
            image_token_index=10,
            spatial_merge_size=2,
            attn_implementation="eager",
        )
    ).eval()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/config.json").write_text(oracle.config.text_config.to_json_string(False))
    stored = {
        name.replace("model.language_model.", "model."): tensor.clone()
        for name, tensor in oracle.state_dict().items()
        if "vision_tower" not in name and "projector" not in name
    }
    save_file(stored, tmp_path / "plain/model.safetensors")
    vision = {
        **sizes, "num_channels": 3, "max_image_size": 56, "rope_theta": 10000.0,
        "image_token_id": 10, "image_break_token_id": 12, "image_end_token_id": 13,
        "adapter_bias": False, "mm_projector_id": "patch_merge", "spatial_merge_size": 2,
        "add_pre_mm_projector_layer_norm": True,
    }  # fmt: skip
    out = publish(tmp_path / "plain", tmp_path / "out", vision_encoder=vision)
    stored = load_file(out / "consolidated.safetensors")
    for name, tensor in oracle.model.named_parameters():
        if not name.startswith("language_model."):
            turned = name.split(".")[-2] in ("q_proj", "k_proj")
            stored[seen(name)] = (unturned(tensor, 2) if turned else tensor).detach().clone()
    save_file(stored, out / "consolidated.safetensors")
    tekken(out)
    table = json.loads((out / "tekken.json").read_text())
    table["image"] = {"image_patch_size": 4, "max_image_size": 56, "spatial_merge_size": 2}
    (out / "tekken.json").write_text(json.dumps(table))
    pixels = torch.randint(0, 255, (20, 30, 3), dtype=torch.uint8).numpy()
    picture, file = Image.fromarray(pixels), io.BytesIO()
    picture.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [
        {"type": "text", "text": "a[IMG]"}, {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "\nb"},
    ]  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=-1)
    with LLM(str(out), dtype="float32", max_model_len=128, max_logprobs=-1) as llm:
        (answer,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    row, ids = [10] * 4, answer.prompt_token_ids
    image = [*row, 12, *row, 12, *row, 13]
    # 40 control tokens come before the bytes; what a user writes stays text.
    assert ids == [1, 3, *(40 + c for c in b"a[IMG]"), *image, *(40 + c for c in b"\nb"), 4]
    (choice,) = answer.outputs
    resized = torch.from_numpy(np.array(picture.resize((32, 24), Image.Resampling.BICUBIC)))
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])
    deviation = torch.tensor([0.26862954, 0.26130258, 0.27577711])
    pixel_values = ((resized / 255 - mean) / deviation).permute(2, 0, 1)[None].float()
    with torch.inference_mode():
        wanted = oracle(
            input_ids=torch.tensor([[*ids, *choice.token_ids[:-1]]]), pixel_values=pixel_values,
            image_sizes=torch.tensor([[24, 32]]),
        )  # fmt: skip
    wanted = wanted.logits[0, -4:].log_softmax(-1)
    ours = [[entry[i].logprob for i in range(wanted.shape[1])] for entry in choice.logprobs]
    torch.testing.assert_close(torch.tensor(ours), wanted, rtol=0, atol=1e-3)


def seen(name):
    """Mistral's name of a tensor around the text model."""
    layer = re.fullmatch(r"vision_tower\.transformer\.layers\.(\d+)\.(.*)\.weight", name)
    if layer:
        block, _, part = layer[2].partition(".")
        inside = {"attention": "self_attn", "feed_forward": "mlp"}.get(block)
        path = NAMES[f"{inside}.{part}"] if inside else block
        return f"vision_encoder.transformer.layers.{layer[1]}.{path}.weight"
    for old, new in (
        ("vision_tower.", "vision_encoder."),
        ("multi_modal_projector.norm", "pre_mm_projector_norm"),
        ("multi_modal_projector.patch_merger", "patch_merger"),
        ("multi_modal_projector.linear_1", "vision_language_adapter.w_in"),
        ("multi_modal_projector.linear_2", "vision_language_adapter.w_out"),
    ):
        name = name.replace(old, new)
    return name


SIZES = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96, "vocab_size": 99,
         "norm_eps": 1e-5}  # fmt: skip
BAD = {
    "no size": ({"hidden_dim": None}, None),
    "another kind": ({"model_type": "mamba"}, r"model_type 'mamba'.*config\.json"),
    "latent attention": ({"kv_lora_rank": 8}, r"latent attention"),
    "latent sizes": (
        {"kv_lora_rank": 8, "moe": {"num_shared_experts": 1}}, r"missing key: qk_nope_head_dim",
    ),
    "audio": ({"multimodal": {"whisper_model_args": {}}}, r"audio models"),
    "an encoder": ({"causal": False}, r"causal is false"),
    "experts without number": ({"moe": {"num_experts": 2}}, r"missing key: moe\.num_experts_"),
    "a table that is none": ({"moe": 3}, r"moe: must be a table"),
    "windows that do not repeat": ({"sliding_window": [1, 2, None]}, r"sliding_window"),
    "an unknown key of yarn": ({"yarn": {"gamma": 1}}, r"yarn\.gamma"),
    "growth without yarn": (
        {"llama_4_scaling": {"beta": 1, "original_max_position_embeddings": 4}}, r"without yarn",
    ),
    "growth without beta": ({"llama_4_scaling": {"x": 1}}, r"llama_4_scaling: beta and"),
    "unknown codes": ({"quantization": {"qformat_weight": "int3"}}, r"quantization: .*int3"),
    "an unknown scheme": (
        {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "ROW"}}, r"qscheme_act",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_with_params_is_said(what):
    changed, message = BAD[what]
    params = {key: value for key, value in {**SIZES, **changed}.items() if value is not None}
    with pytest.raises(ModulmError, match=message or r"file: missing key: hidden_dim"):
        configuration(params, "file")


def test_names_and_files_that_do_not_fit_are_said(native):
    stored = load_file(native / "consolidated.safetensors")
    save_file({**stored, "layers.0.attention.wx.weight": torch.zeros(1)},
              native / "consolidated.safetensors")  # fmt: skip
    with pytest.raises(ModulmError, match=r"layers\.0\.attention\.wx\.weight: unknown tensor name"):
        run(native)
    for text, message in (("[1]", "must be a JSON object"), ("{", r"params\.json: ")):
        (native / "params.json").write_text(text)
        with pytest.raises(ModulmError, match=message):
            run(native)
