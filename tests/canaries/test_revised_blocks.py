"""Blocks of tokens that are revised in place, by a package outside the core, compared with the same
decoding in plain torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.canaries.revised_blocks import RevisedBlocks

from modulm import LLM, SamplingParams
from modulm.errors import ConfigError
from modulm.plugins.manager import PluginManager, current, using
from modulm.testing.checkpoints import make_tiny
from modulm.testing.engines import check_empty

PROMPTS = [[5, 99, 7, 30], [17], [8, 9] * 4, [7, 9, 11, 13] * 9, [3, 4, 5], list(range(40, 65))]
GREEDY = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
SETTINGS = {
    "attention_backend": "sdpa",
    "kernels": "none",
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 72,
    "block_size": 16,
    "disable_frontend_multiprocessing": True,
}
SIZE, SURE, MASK = RevisedBlocks.size, RevisedBlocks.sure, RevisedBlocks.mask


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return make_tiny(tmp_path_factory.mktemp("blocks"), "LlamaForCausalLM", rope_parameters=rope)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with using(PluginManager()):
        current().register("step_parts", RevisedBlocks.name, RevisedBlocks)
        with LLM(str(folder), **SETTINGS) as opened:
            yield opened


class PlainLlama:
    """The model over whole sequences, in which tokens see their block and all before it."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        self.size = self.config["hidden_size"] // self.config["num_attention_heads"]
        steps = torch.arange(0, self.size, 2) / self.size
        self.frequencies = 1 / self.config["rope_parameters"]["rope_theta"] ** steps

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocabulary]"""
        w, eps = self.weights, self.config["rms_norm_eps"]
        positions = torch.arange(len(tokens))
        sees = positions[None] // SIZE <= positions[:, None] // SIZE
        angles = (positions[:, None] * self.frequencies).repeat(1, 2)
        x = w["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            h = F.rms_norm(x, x.shape[1:], w[at + "input_layernorm.weight"], eps)
            q, k, v = (
                F.linear(h, w[f"{at}self_attn.{name}_proj.weight"])
                .view(len(tokens), -1, self.size)
                .transpose(0, 1)
                for name in "qkv"
            )
            q, k = (part * angles.cos() + _turned(part) * angles.sin() for part in (q, k))
            a = F.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=sees, enable_gqa=True
            )
            a = a[0].transpose(0, 1).flatten(1)
            x = x + F.linear(a, w[at + "self_attn.o_proj.weight"])
            h = F.rms_norm(x, x.shape[1:], w[at + "post_attention_layernorm.weight"], eps)
            gate, up = (F.linear(h, w[f"{at}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, w[at + "mlp.down_proj.weight"])
        x = F.rms_norm(x, x.shape[1:], w["model.norm.weight"], eps)
        return F.linear(x, w.get("lm_head.weight", w["model.embed_tokens.weight"]))

    def generate(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            end = min((len(tokens) // SIZE + 1) * SIZE, len(prompt) + count)
            tokens += [MASK] * (end - len(tokens))
            while MASK in tokens[len(prompt) :]:
                logits = self.logits(tokens)
                logits[:, MASK] = -torch.inf
                best = logits.softmax(-1).max(-1)
                open_places = [i for i in range(len(prompt), end) if tokens[i] == MASK]
                open_places.sort(key=lambda place: -best.values[place].item())
                for place in open_places[:SURE]:
                    tokens[place] = int(best.indices[place])
        return tokens[len(prompt) :]


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Any]:
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [each.outputs[0] for each in llm.generate(given, params, use_tqdm=False)]


@torch.inference_mode()
def test_blocks_are_those_of_plain_torch(llm: LLM, folder: Path) -> None:
    model = PlainLlama(folder)
    expected = [model.generate(prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    assert [answer.token_ids for answer in answers(llm, PROMPTS)] == expected
    check_empty(llm._core.loop)
    # Prompts that go on where answers ended find these in the cache.
    longer = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    expected = [model.generate(prompt, 9) for prompt in longer]
    assert [a.token_ids for a in answers(llm, longer, GREEDY.with_(max_tokens=9))] == expected


def test_a_stop_token_ends_a_block(llm: LLM) -> None:
    (whole,) = answers(llm, PROMPTS[:1])
    stop = whole.token_ids[6]
    first = whole.token_ids.index(stop)
    (ended,) = answers(llm, PROMPTS[:1], GREEDY.with_(stop_token_ids=[stop], ignore_eos=False))
    assert ended.token_ids == whole.token_ids[: first + 1]
    assert ended.finish_reason == "stop"


def test_aborted_inside_a_block(llm: LLM) -> None:
    loop = llm._core.loop
    for number, prompt in enumerate(PROMPTS):
        pending = llm._input_processor.process({"prompt_token_ids": prompt}, GREEDY, f"r{number}")
        llm._output_processor.add(pending.state)
        llm._core.submit(*pending.requests)
        for _ in range(1 + number):
            loop.tick()
        for identity in llm._output_processor.abort(pending.state):
            loop.abort(identity)
    while loop.tick():
        pass
    check_empty(loop)


def test_steps_without_room_for_blocks_are_refused(folder: Path) -> None:
    with using(PluginManager()):
        current().register("step_parts", RevisedBlocks.name, RevisedBlocks)
        with pytest.raises(ConfigError, match="blocks of 8 tokens need room"):
            LLM(str(folder), **{**SETTINGS, "max_num_batched_tokens": 48})
