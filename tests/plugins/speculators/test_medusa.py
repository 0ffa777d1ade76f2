"""Medusa heads in both published layouts: their drafts are those of the formula, computed apart
from the engine, and no answer changes.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.nn import functional as F

from modulm import LLM, SamplingParams
from modulm.errors import ConfigError
from modulm.testing.checkpoints import make_tiny
from modulm_speculator_medusa.speculator import Heads, Medusa, MedusaOptions

PROMPTS = [[5, 99, 7, 300, 41, 8], [17, 3], [8] * 12]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
HEADS, HIDDEN, WORDS = 3, 64, 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("medusa") / "tiny"))


def make_heads(seed: int = 1):
    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(HIDDEN, HIDDEN, generator=draw) * 0.2,
            torch.randn(HIDDEN, generator=draw),
            torch.randn(WORDS, HIDDEN, generator=draw),
        )
        for _ in range(HEADS)
    ]


def own(path: Path, heads, prefix: str = "") -> str:
    """Medusa's own files."""
    path.mkdir()
    tensors = {}
    for index, (weight, bias, output) in enumerate(heads):
        tensors[f"{prefix}{index}.0.linear.weight"] = weight
        tensors[f"{prefix}{index}.0.linear.bias"] = bias
        tensors[f"{prefix}{index}.1.weight"] = output
    save_file(tensors, path / "medusa_lm_head.safetensors")
    table = {"medusa_num_heads": HEADS, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    (path / "config.json").write_text(json.dumps(table))
    return str(path)


def converted(path: Path, heads, token_ids: torch.Tensor | None = None) -> str:
    """The layout that vLLM reads, here with a head of fewer words."""
    path.mkdir()
    tensors = {}
    for index, (weight, bias, output) in enumerate(heads):
        tensors[f"blocks.{index}.layers.0.weight"] = weight
        tensors[f"blocks.{index}.layers.0.bias"] = bias
        tensors[f"lm_heads.{index}.weight"] = (
            output if token_ids is None else output[token_ids].clone()
        )
    if token_ids is not None:
        tensors["token_map"] = token_ids
    save_file(tensors, path / "model.safetensors")
    table = {"architectures": ["MedusaModel"], "num_heads": HEADS, "hidden_size": HIDDEN}
    (path / "config.json").write_text(json.dumps(table))
    return str(path)


def answers(folder: str, **flags: object) -> list[list[int]]:
    sizes = {"max_model_len": 96, "num_gpu_blocks_override": 48, "max_num_seqs": 8}
    with LLM(folder, dtype="float32", **sizes, **flags) as llm:
        requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [o.outputs[0].token_ids for o in llm.generate(requests, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("layout", ["own", "prefixed", "converted", "fewer words"])
def test_what_is_drafted_is_what_the_heads_say(folder, tmp_path, monkeypatch, layout) -> None:
    heads, token_ids = make_heads(), torch.arange(0, WORDS, 3)
    path = tmp_path / "heads"
    model = {
        "own": lambda: own(path, heads),
        "prefixed": lambda: own(path, heads, "medusa_head."),
        "converted": lambda: converted(path, heads),
        "fewer words": lambda: converted(path, heads, token_ids),
    }[layout]()
    seen: list[tuple[torch.Tensor, np.ndarray]] = []
    plain = Medusa.propose

    def propose(self, step):
        proposed = plain(self, step)
        seen.extend(
            zip(step.hidden[torch.from_numpy(step.accepted)].clone(), proposed, strict=True)
        )
        return proposed

    monkeypatch.setattr(Medusa, "propose", propose)
    expected = answers(folder)
    table = {"method": "medusa", "model": model, "adaptive": False}
    assert answers(folder, speculative_config=table) == expected
    # The last state of the first prompt, by transformers.
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        state = reference.model(torch.tensor([PROMPTS[0]])).last_hidden_state[0, -1]
    assert torch.allclose(seen[0][0], state, atol=1e-4)
    for state, drafts in seen:
        assert len(drafts) <= HEADS
        for (weight, bias, output), token in zip(heads, drafts.tolist(), strict=False):
            logits = F.linear(state + F.silu(F.linear(state, weight, bias)), output)
            if layout == "fewer words":
                logits = torch.where(torch.arange(WORDS) % 3 == 0, logits, -torch.inf)
            assert token == int(logits.argmax())
    assert max(len(drafts) for _, drafts in seen) == HEADS


def test_fewer_drafts_than_heads_and_rows_with_limits() -> None:
    target = SimpleNamespace(logits=lambda x: x)
    heads = Heads([[], [], []], [None] * 3, None, target)
    medusa = Medusa(MedusaOptions(model="m", num_speculative_tokens=2), heads)
    assert medusa.most == 2
    step = SimpleNamespace(
        hidden=torch.eye(4), accepted=np.array([2, 1, 3]), most=[2, 0, 1], rows=[5, 6, 7]
    )
    assert [each.tolist() for each in medusa.propose(step)] == [[2, 2], [], [3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("1.0.linear.weight"), "3 heads are declared, but 2 exist|weight"),
        (lambda t: t.update(odd=torch.zeros(1)), "odd is not part of Medusa heads"),
        (
            lambda t: t.update({"0.1.weight": torch.zeros(9, HIDDEN)}),
            r"\[9, 64\] where \[512, 64\]",
        ),
    ],
)
def test_files_that_do_not_fit(folder, tmp_path, change, message) -> None:
    from safetensors.torch import load_file

    path = own(tmp_path / "heads", make_heads())
    tensors = load_file(f"{path}/medusa_lm_head.safetensors")
    change(tensors)
    save_file(tensors, f"{path}/medusa_lm_head.safetensors")
    with pytest.raises(ConfigError, match=message):
        answers(folder, speculative_config={"method": "medusa", "model": path})


def test_heads_have_to_be_named(folder) -> None:
    with pytest.raises(ConfigError, match="medusa needs the path or hub id of its heads"):
        answers(folder, spec_method="medusa")
