"""`modulm quantize`: modulm and transformers read its folders alike, and killed runs go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file
from samples import parametrize_sample
from transformers import AutoModelForCausalLM

from modulm.errors import ModulmError
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session
from modulm_command_quantize.command import command
from modulm_command_quantize.gptq import gptq
from modulm_command_quantize.schemes import SCHEMES

TOKENS = [5, 77, 130, 9, 301, 42, 8, 250, 12, 400, 33, 60, 71, 15, 2, 99]
SMALL = ["--samples", "4", "--length", "32", "--no-perplexity"]
#: Schemes whose layers have the inputs of the tiny model, and options.
RUNS = {
    "w4a16": ["--scheme", "w4a16", "--group-size", "32"],
    "w4a16-asym": ["--scheme", "w4a16-asym", "--group-size", "32"],
    "w8a16": ["--scheme", "w8a16"],
    "w8a8": ["--scheme", "w8a8"],
    "w4a8": ["--scheme", "w4a8", "--group-size", "32"],
    "fp8": ["--scheme", "fp8"],
    "gptq": ["--scheme", "w4a16", "--group-size", "32", "--method", "gptq"],
    "awq": ["--scheme", "w4a16", "--group-size", "32", "--method", "awq"],
}


def ran(*arguments) -> str:
    return CliRunner().invoke(command, [*map(str, arguments)], catch_exceptions=False).output


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("plain"), "Qwen2ForCausalLM")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [
        {"text": " ".join(f"word {i} of line {line}" for i in range(20))} for line in range(12)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def opened(out, plain):
    """By transformers and compressed-tensors."""
    return AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def unpacked(out, plain):
    """By compressed-tensors alone: transformers 5.23 takes no packed zero points."""
    oracle = opened(plain, plain)
    group = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    scheme = QuantizationScheme(**group["group_0"])
    coder = BaseCompressor.get_value_from_registry("pack-quantized")
    stored = {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()}
    for name in [name for name in stored if name.endswith("weight_packed")]:
        path = name.removesuffix(".weight_packed")
        ends = ("packed", "scale", "zero_point", "shape")
        held = {f"weight_{end}": stored[f"{path}.weight_{end}"] for end in ends}
        held["weight_scale"] = held["weight_scale"].float()  # it gives what scales are
        weight = coder.decompress(held, scheme)["weight"]
        oracle.get_submodule(path).weight.data.copy_(weight)
    return oracle


@parametrize_sample("name", RUNS, every=4)
def test_modulm_and_transformers_read_it_alike(plain, text, tmp_path, name):
    out = tmp_path / "out"
    ran(plain, out, *RUNS[name], "--data", text, *SMALL)
    found = Session(out, device="cpu", dtype="float32", block_size=16).step({0: TOKENS})[0]
    oracle = (unpacked if name == "w4a16-asym" else opened)(out, plain)
    for module in oracle.modules():  # kernels round activations in a way of their own
        if hasattr(module, "quantization_scheme"):
            module.quantization_scheme.input_activations = None
    with torch.inference_mode():
        wanted = oracle(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)
    exact = Session(plain, device="cpu", dtype="float32").step({0: TOKENS})[0]
    assert 0 < (found - exact).abs().mean() < (0.2 if name in ("w8a16", "w8a8", "fp8") else 1.0)
    assert not (out / ".quantize").exists()


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8"])
def test_gptq_changes_outputs_less_than_rounding(scheme):
    torch.manual_seed(0)
    chosen, weight = SCHEMES[scheme].sized(32 if scheme == "w4a16" else None), torch.randn(48, 64)
    inputs = torch.randn(512, 64) @ torch.randn(64, 64)
    codes, grid = gptq(weight, inputs.T @ inputs, chosen)
    plain = chosen.grid(weight)
    errors = [
        (inputs @ (held.weight(some) - weight).T).norm()
        for held, some in ((grid, codes), (plain, plain.codes(weight)))
    ]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.exhaustive
def test_experts_stored_one_by_one(tmp_path):
    folder = make_tiny(tmp_path / "plain", "MixtralForCausalLM", intermediate_size=64)
    before = load_file(folder / "model.safetensors")
    separate = [name for name in before if "experts.0." in name]
    ran(folder, tmp_path / "out", *RUNS["w8a16"], "--no-perplexity")
    table = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert any("gate" in path for path in table["ignore"])
    assert separate
    runs = [
        Session(f, device="cpu", dtype="float32").step({0: TOKENS})[0]
        for f in (folder, tmp_path / "out")
    ]
    assert 0 < (runs[0] - runs[1]).abs().mean() < 0.1
    with pytest.raises(ModulmError, match=r"the checkpoint does not: use --method rtn"):
        ran(folder, tmp_path / "more", *RUNS["gptq"], *SMALL)


@pytest.mark.exhaustive
def test_a_killed_run_goes_on(plain, text, tmp_path):
    """Killed after its first layer: what is written stays, and the end is the same."""
    arguments = [*RUNS["gptq"], "--data", str(text), *SMALL]
    whole, out = tmp_path / "whole", tmp_path / "out"
    ran(plain, whole, *arguments)
    line = [sys.executable, "-m", "modulm", "quantize", str(plain), str(out), *arguments]
    stop = "import modulm_command_quantize.work as w, os, signal\nold = w.Job._layer\n"
    stop += "def slow(self, layers, step, *rest):\n"
    stop += "    if step == 1: print('second', flush=True); os.kill(os.getpid(), signal.SIGSTOP)\n"
    stop += "    return old(self, layers, step, *rest)\nw.Job._layer = slow\n"
    stop += "from modulm.cli.main import main\nmain()\n"
    process = subprocess.Popen([sys.executable, "-c", stop, *line[3:]], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"second\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=300)
    process.stdout.close()
    kept = {file.name: file.stat().st_mtime_ns for file in out.glob("*.safetensors")}
    assert len(kept) == 1
    assert not (out / "config.json").exists()
    with pytest.raises(ModulmError, match="other settings"):
        ran(plain, out, *RUNS["w8a8"], *SMALL)
    ran(plain, out, *arguments)
    for name, written in kept.items():
        assert (out / name).stat().st_mtime_ns == written
    for file in whole.glob("*.safetensors"):
        one, other = load_file(file), load_file(out / file.name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ModulmError, match="not empty"):
        ran(plain, out, *arguments)


BAD = {
    "a group size of eight bits": (["--scheme", "w8a8", "--group-size", "32"], "not per group"),
    "a group that never fits": (["--scheme", "w4a16", "--group-size", "56"], "no layer can be"),
    "half of a fused layer": ([*RUNS["w8a8"], "--ignore", "q_proj"], "fused with"),
    "too little text": (
        [*RUNS["gptq"], "--length", "4000", "--samples", "4"],
        "do not fill a sample",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_done_is_refused(plain, text, tmp_path, what):
    arguments, message = BAD[what]
    with pytest.raises(ModulmError, match=message):
        ran(plain, tmp_path / "out", *arguments, "--data", text, "--no-perplexity")
    assert not (tmp_path / "out").exists()


def test_a_quantized_checkpoint_and_other_norms_are_refused(plain, text, tmp_path):
    ran(plain, tmp_path / "once", *RUNS["w8a8"], "--no-perplexity")
    with pytest.raises(ModulmError, match="already quantized"):
        ran(tmp_path / "once", tmp_path / "twice", *RUNS["w8a8"], "--no-perplexity")
    gemma = make_tiny(tmp_path / "gemma", "GemmaForCausalLM")
    with pytest.raises(ModulmError, match="cannot be moved through the norms"):
        ran(gemma, tmp_path / "out", *RUNS["awq"], "--data", text, *SMALL)


@pytest.mark.exhaustive
def test_perplexities_of_the_embedded_model(tmp_path):
    shown = ran("demo", tmp_path / "out", "--scheme", "w8a16", "--length", "64")
    before, after = (float(shown.split(word)[0].split()[-1]) for word in (" before", " after"))
    assert 1 < before < 5
    assert after == pytest.approx(before, rel=0.01)
