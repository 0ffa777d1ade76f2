"""gpt-oss with its experts in MXFP4 as published, against transformers' own reading of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from modulm import LLM, SamplingParams
from modulm.contracts.quantization import LinearSpec
from modulm.ops import bind
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session
from modulm_quant_mxfp4.method import Mxfp4, Mxfp4Config

transformers_mxfp4 = pytest.importorskip(
    "transformers.integrations.mxfp4", reason="this transformers has no MXFP4 to compare with"
)

TABLE = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def with_blocks(stored):
    """The tensors of a checkpoint with random blocks and scales in place of expert weights."""
    tensors = {}
    for name, tensor in stored.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 123, shape, dtype=torch.uint8)
    return tensors


def dequantized(stored):
    """The same checkpoint in bf16, by transformers."""
    tensors = {name: t for name, t in stored.items() if not name.endswith(("_blocks", "_scales"))}
    for name in stored:
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            tensors[stem] = transformers_mxfp4.convert_moe_packed_tensors(
                stored[name], stored[f"{stem}_scales"]
            )
    return tensors


def rewrite(folder: Path, change, table=None) -> Path:
    weights = folder / "model.safetensors"
    save_file(change(load_file(weights)), weights, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if table is not None:
        config["quantization_config"] = table
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The checkpoint in MXFP4, and what it stands for in bf16."""
    folder = tmp_path_factory.mktemp("mxfp4")
    checkpoints = [
        make_tiny(folder / name, "GptOssForCausalLM", dtype="bfloat16", intermediate_size=96)
        for name in ("blocks", "plain")
    ]
    torch.manual_seed(0)
    blocks = rewrite(checkpoints[0], with_blocks, TABLE)
    stored = load_file(blocks / "model.safetensors")
    return blocks, rewrite(checkpoints[1], lambda _: dequantized(stored))


def test_equals_transformers(folders):
    """In fp32: the log probabilities of all tokens; transformers unpacked its weights itself."""
    blocks, plain = folders
    tokens = [5, 77, 130, 9, 301, 42, 8, 250, 12, 400, 33, 60, 71, 15, 2, 99]
    session = Session(blocks, device="cpu", dtype="float32", block_size=16)
    logprobs = session.step({0: tokens})[0]
    oracle = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        wanted = oracle(torch.tensor([tokens])).logits[0].log_softmax(-1)
    torch.testing.assert_close(logprobs, wanted, rtol=1e-4, atol=1e-4)


def test_the_same_tokens_as_the_bf16_model(folders):
    """Exactly without kernels: scales are powers of 2, so that products in bf16 lose nothing."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
    token_lists = []
    for folder in folders:
        llm = LLM(str(folder), dtype="bfloat16", max_model_len=128, kernels=["none"])
        answers = llm.generate(["one two", "a", "third prompt"], params, use_tqdm=False)
        token_lists.append(
            [(a.outputs[0].token_ids, a.outputs[0].cumulative_logprob) for a in answers]
        )
        del llm
    assert token_lists[0] == token_lists[1]
    assert len({token for tokens, _ in token_lists[0] for token in tokens}) > 3


def test_kernels_multiply_what_bf16_stands_for(folders):
    """Activations are integers of 16 bits: as close as bf16 is to itself in another order."""
    tokens = list(range(20, 60))
    actual, wanted = (
        Session(folder, device="cpu", dtype="bfloat16", block_size=16).step({0: tokens})[0]
        for folder in folders
    )
    assert (actual - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dequantizes_as_transformers_does(dtype, dequantize):
    torch.manual_seed(0)
    spec = LinearSpec("mlp.experts.down_proj", 96, (64,), False, dtype, "expert", experts=3)
    blocks = torch.randint(256, (3, 64, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 64, 3), dtype=torch.uint8)
    platform = manager.current().load("platforms", "cpu")()
    method = Mxfp4(Mxfp4Config(quant_method="mxfp4", dequantize=dequantize), platform, bind())
    layer = torch.nn.Module()
    for name, tensor in (("blocks", blocks), ("scales", scales)):
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    method.finish(layer, spec)
    wanted = transformers_mxfp4.convert_moe_packed_tensors(
        blocks, scales, dtype=getattr(torch, dtype)
    ).transpose(1, 2)
    assert torch.equal(method.dequantize(layer, spec), wanted)
    assert torch.equal(method.experts(layer)[2], wanted[2])
    assert dict(layer.named_parameters()) == {}


def test_modules_that_are_not_converted():
    method = Mxfp4(Mxfp4Config(**TABLE), None, None)
    skipped = ("model.layers.3.self_attn.qkv_proj", "model.layers.11.mlp.router", "lm_head")
    assert all(method.skips(name) for name in skipped)
    assert not method.skips("model.layers.3.mlp.experts.gate_up_proj")
    assert not method.skips("lm_head_of_another")


def test_only_experts_are_held():
    assert "experts, not linear" in Mxfp4.rejects(
        LinearSpec("q_proj", 64, (64,), False, "bfloat16"), None
    )
    assert "blocks of 32" in Mxfp4.rejects(
        LinearSpec("down_proj", 48, (64,), False, "bfloat16", "expert", experts=2), None
    )
