"""What is MLX's own beside layers: tables, heads, routers, stacks of experts, its words in
config.json.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.plugins.quantization.test_published import GROUP, TOKENS, Case, mlx, write_settings
from transformers import AutoModelForCausalLM

from modulm.cli.main import main
from modulm.errors import ModulmError
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session

TABLE = {"bits": 4, "group_size": GROUP}
MOE = {"moe_intermediate_size": 64, "intermediate_size": 128, "head_dim": 32}


def publish(folder, architecture, table, **settings):
    """A folder whose matrices are all codes, experts in stacks, and a plain one of the same."""
    folders = [make_tiny(folder / "coded", architecture, **settings), folder / "plain"]
    shutil.copytree(*folders)
    stored, plain, stacks = {}, {}, {}
    for name, tensor in load_file(folders[0] / "model.safetensors").items():
        if tensor.dim() == 1:
            stored[name] = plain[name] = tensor
            continue
        tensors, dequantized = mlx(tensor, Case(table, mlx), name)
        plain[name] = dequantized.to(tensor.dtype).contiguous()
        path = name.removesuffix("weight")
        if ".experts." not in path:
            stored |= {f"{path}{key}": value.contiguous() for key, value in tensors.items()}
            continue
        before, _, one = path.partition(".experts.")
        part = one.split(".")[1]
        for key, value in tensors.items():
            stacks.setdefault(f"{before}.switch_mlp.{part}.{key}", []).append(value)
    stored |= {name: torch.stack(each) for name, each in stacks.items()}
    save_file(stored, folders[0] / "model.safetensors", {"format": "mlx"})
    save_file(plain, folders[1] / "model.safetensors", {"format": "pt"})
    write_settings(folders[0], quantization=table, quantization_config=table)
    return folders


CASES = {
    "a head of its own": ("Qwen3ForCausalLM", TABLE, {"tie_word_embeddings": False}),
    "a head that is the table": ("Qwen3ForCausalLM", TABLE, {"tie_word_embeddings": True}),
    "experts": (
        "Qwen3MoeForCausalLM",
        TABLE | {f"model.layers.{i}.mlp.gate": {"bits": 8, "group_size": GROUP} for i in range(3)},
        MOE,
    ),
}


@pytest.fixture(scope="module", params=CASES)
def folders(request, tmp_path_factory):
    architecture, table, settings = CASES[request.param]
    return publish(tmp_path_factory.mktemp("mlx"), architecture, table, **settings)


def test_the_numbers_of_the_dequantized_weights(folders):
    coded, plain = folders
    logprobs = Session(coded, device="cpu", dtype="float32", block_size=16).step({0: TOKENS})[0]
    oracle = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        wanted = oracle(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-3)


def test_on_the_kernels_as_exact_as_bf16(folders):
    exact = Session(folders[1], device="cpu", dtype="float32").step({0: TOKENS})[0]
    runs = [Session(f, device="cpu", dtype="bfloat16").step({0: TOKENS})[0] for f in folders]
    errors = [(run.float() - exact).abs().mean().item() for run in runs]
    assert errors[0] < 1.6 * errors[1]


def test_older_files_have_a_key_of_their_own(folders, tmp_path):
    coded = shutil.copytree(folders[0], tmp_path / "older")
    config = json.loads((coded / "config.json").read_text())
    del config["quantization_config"]
    (coded / "config.json").write_text(json.dumps(config))
    runs = [
        Session(f, device="cpu", dtype="float32").step({0: TOKENS})[0] for f in (coded, folders[0])
    ]
    assert torch.equal(*runs)


@pytest.mark.parametrize(("table", "message"), [
    (TABLE | {"mode": "mxfp4"}, "mode.*mxfp4"),
    (TABLE | {"bits": 7}, "bits.*7"),
    (TABLE | {"group_size": 48}, "group size 48"),
    (TABLE | {"model.layers.0.mlp.up_proj": {"bits": 1}}, "up_proj.*bits"),
])  # fmt: skip
def test_what_is_not_known_is_named(folders, tmp_path, table, message):
    coded = shutil.copytree(folders[0], tmp_path / "own")
    write_settings(coded, quantization_config=table)
    with pytest.raises(ModulmError, match=message):
        Session(coded, device="cpu", dtype="float32")


def test_explain_names_the_scheme(folders, capsys):
    with pytest.raises(SystemExit):
        main(["explain", str(folders[0]), "--dtype", "bfloat16"])
    assert "int4, a scale and zero point per 32 inputs" in capsys.readouterr().out
