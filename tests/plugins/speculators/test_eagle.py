"""EAGLE and EAGLE-3 heads in the layouts in which they are published, against plain torch."""

from __future__ import annotations

import json
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from samples import parametrize_sample
from torch import Tensor

from modulm import LLM, SamplingParams
from modulm.errors import ConfigError
from modulm.testing.checkpoints import make_tiny
from modulm_speculation.draft_model import DraftModel
from modulm_speculation.step.planner import DraftPlanner

HIDDEN, INNER, HEADS, KV, WORDS, SMALL = 64, 96, 4, 2, 512, 200
DIM, EPS, THETA = HIDDEN // HEADS, 1e-5, 10000.0
PROMPTS = [[5, 99, 7, 300], [17], [8, 3] * 21, list(range(100, 150)), [3, 4, 5]]
SHARED = [[7, 9, 11, 13] * 9 + [40], [7, 9, 11, 13] * 9 + [41]]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SIZES = {"max_model_len": 128, "max_num_batched_tokens": 32, "block_size": 16, "dtype": "float32"}
PLAIN = {"kernels": "none", "attention_backend": "sdpa"}


def weights(seed: int, third: bool, bias: bool, norms: bool = False) -> dict[str, Tensor]:
    """The tensors of a head's file."""
    draw = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) * 1.5 / shape[-1] ** 0.5

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(HIDDEN, generator=draw)

    at, wide = ("midlayer.", 2 * HIDDEN) if third else ("layers.0.", HIDDEN)
    tensors = {
        f"{at}self_attn.q_proj.weight": matrix(HIDDEN, wide),
        f"{at}self_attn.k_proj.weight": matrix(KV * DIM, wide),
        f"{at}self_attn.v_proj.weight": matrix(KV * DIM, wide),
        f"{at}self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
        f"{at}mlp.gate_proj.weight": matrix(INNER, HIDDEN),
        f"{at}mlp.up_proj.weight": matrix(INNER, HIDDEN),
        f"{at}mlp.down_proj.weight": matrix(HIDDEN, INNER),
        f"{at}post_attention_layernorm.weight": norm(),
        "fc.weight": matrix(HIDDEN, (3 if third else 2) * HIDDEN),
    }
    if bias:
        tensors["fc.bias"] = 0.3 * torch.randn(HIDDEN, generator=draw)
    if norms:
        tensors |= {"embedding_layernorm.weight": norm(), "hidden_states_layernorm.weight": norm()}
    if third:
        tokens = torch.randperm(WORDS, generator=draw)[:SMALL].sort().values
        tensors |= {
            "midlayer.input_layernorm.weight": norm(),
            "midlayer.hidden_norm.weight": norm(),
            "norm.weight": norm(),
            "lm_head.weight": matrix(SMALL, HIDDEN),
            "d2t": tokens - torch.arange(SMALL),
            "t2d": torch.zeros(WORDS, dtype=torch.bool).index_fill(0, tokens, True),
        }
    return tensors


def write(folder, tensors, architecture, **more) -> str:
    table = {
        "architectures": [architecture], "model_type": "llama", "vocab_size": WORDS,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "rms_norm_eps": EPS,
        "rope_theta": THETA, "max_position_embeddings": 64, "hidden_act": "silu", **more,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(table))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: Tensor) -> Tensor:
    """x: [heads, tokens, dim], turned by its positions from 0."""
    angles = torch.arange(x.shape[1])[:, None] / THETA ** (torch.arange(0, DIM, 2) / DIM)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Reference:
    """A head in plain torch: whole sequences, no cache, as its authors wrote it."""

    def __init__(self, folder, tensors, *, third: bool, before: bool = False, norms: bool = False):
        from transformers import AutoModelForCausalLM

        self.target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.third, self.before, self.norms = third, before, norms
        self.w = {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
        self.raw: dict[int, Tensor] = {}
        for index, layer in enumerate(self.target.model.layers):
            layer.register_forward_hook(lambda _m, _a, out, i=index: self.raw.update({i: out}))

    def layer(self, x: Tensor, residual: Tensor) -> Tensor:
        w, at = self.w, "layers.0."
        q, k, v = (F.linear(x, w[f"{at}self_attn.{n}_proj.weight"]) for n in "qkv")
        split = [t.view(len(t), -1, DIM).transpose(0, 1) for t in (q, k, v)]
        q, k = rotate(split[0]), rotate(split[1])
        k, v = (t.repeat_interleave(HEADS // KV, 0) for t in (k, split[2]))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        residual = residual + F.linear(seen, w[f"{at}self_attn.o_proj.weight"])
        x = rms(residual, w[f"{at}post_attention_layernorm.weight"])
        gate = F.silu(F.linear(x, w[f"{at}mlp.gate_proj.weight"]))
        inner = gate * F.linear(x, w[f"{at}mlp.up_proj.weight"])
        return residual + F.linear(inner, w[f"{at}mlp.down_proj.weight"])

    def states(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        embedded = self.target.model.embed_tokens(torch.tensor(tokens))
        if self.third:
            normed = rms(hidden, self.w["layers.0.hidden_norm.weight"])
            embedded = rms(embedded, self.w["layers.0.input_layernorm.weight"])
            return self.layer(torch.cat([embedded, normed], -1), normed if self.before else hidden)
        if self.norms:
            embedded = rms(embedded, self.w["embedding_layernorm.weight"])
            hidden = rms(hidden, self.w["hidden_states_layernorm.weight"])
        x = F.linear(torch.cat([embedded, hidden], -1), self.w["fc.weight"], self.w.get("fc.bias"))
        return self.layer(x, x)

    def token(self, state: Tensor) -> int:
        if not self.third:
            return int(self.target.lm_head(state).argmax())
        draft_id = F.linear(rms(state, self.w["norm.weight"]), self.w["lm_head.weight"]).argmax()
        return int(draft_id + self.w["d2t"][draft_id])

    @torch.no_grad()
    def drafts(self, history: list[int], count: int) -> list[int]:
        """What follows a text: from all its tokens, the last of which has not been run."""
        last = self.target.model(torch.tensor([history[:-1]])).last_hidden_state[0]
        hidden = last
        if self.third:
            three = [self.raw[i].reshape(-1, HIDDEN) for i in (1, 1, 2)]
            hidden = F.linear(torch.cat(three, -1), self.w["fc.weight"])
        tokens, drafted = history[1:], []
        while len(drafted) < count:
            state = self.states(hidden, tokens)[-1]
            drafted.append(self.token(state))
            hidden, tokens = torch.cat([hidden, state[None]]), [*tokens, drafted[-1]]
        return drafted


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eagle") / "target"
    return str(make_tiny(folder, num_hidden_layers=5))


def run(folder, prompts=PROMPTS, **flags):
    """Tokens of all prompts; each text that was drafted for, with its drafts."""
    proposals: list[tuple[list[int], list[int]]] = []
    settle = DraftPlanner.settle

    def recorded(planner, rows, ends, owners):
        alive = set(owners.tolist())
        proposals.extend(
            (planner._table.history(row).tolist(), tokens.tolist())
            for row, tokens in planner._proposals.items() if row in alive
        )  # fmt: skip
        settle(planner, rows, ends, owners)

    with (
        patch.object(DraftPlanner, "settle", recorded),
        LLM(folder, **{"num_gpu_blocks_override": 60, **SIZES, **flags}) as llm,
    ):
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = [o.outputs[0].token_ids for o in llm.generate(requests, GREEDY, use_tqdm=False)]
    return answers, proposals


def spec(method, model, **more):
    table = {"method": method, "model": model, "adaptive": False, "num_speculative_tokens": 3}
    return {"speculative_config": {**table, **more}}


THREE = {"draft_vocab_size": SMALL, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 3]}}


@parametrize_sample(
    "flags", [{}, PLAIN, {"enforce_eager": True}], every=3, ids=["", "torch", "eager"]
)
@pytest.mark.parametrize(
    ("architecture", "third", "bias", "more"),
    [
        ("LlamaForCausalLMEagle", False, True, {"bias": True}),
        ("EagleLlamaForCausalLM", False, False, {"add_para_norm": True}),
        ("LlamaForCausalLMEagle3", True, False, THREE),
        ("Eagle3LlamaForCausalLM", True, False, {**THREE, "norm_before_residual": True}),
    ],
)
def test_drafts_are_those_of_plain_torch(
    target, tmp_path, architecture, third, bias, more, flags, monkeypatch
):
    norms = more.get("add_para_norm", False)
    tensors = weights(1, third, bias, norms)
    head = write(tmp_path / "head", tensors, architecture, **more)
    method = "eagle3" if third else "eagle"
    expected, _ = run(target, **flags)
    heads: list[DraftModel] = []
    plain = DraftModel.__init__

    def opened(self, *arguments):
        plain(self, *arguments)
        heads.append(self)

    monkeypatch.setattr(DraftModel, "__init__", opened)
    answers, proposals = run(target, **flags, **spec(method, head))
    assert answers == expected
    before = more.get("norm_before_residual", False)
    reference = Reference(target, tensors, third=third, before=before, norms=norms)
    assert len(proposals) > 40
    for history, drafts in proposals:
        assert drafts == reference.drafts(history, len(drafts))
    if not flags:
        pytest.importorskip("modulm_kernels_cpu", reason="no compiled CPU kernels")
        assert heads[0]._forward.reason is None  # its single steps are recorded
        programs = heads[0]._forward._programs.values()
        sizes = [program.inputs.step.query_starts.shape[0] - 1 for program in programs]
        tokens = [program.inputs.step.tokens.shape[0] for program in programs]
        assert sizes != tokens  # and what follows a step of verified drafts


def test_a_head_as_the_speculators_library_writes_it(target, tmp_path) -> None:
    stored = weights(2, True, False)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in stored.items()}
    head = write(tmp_path / "head", tensors, "Eagle3Speculator")
    table = json.loads((tmp_path / "head/config.json").read_text())
    layer = {
        key: table.pop(key) for key in list(table) if key not in ("architectures", "model_type")
    }
    outer = {
        **table, "speculators_model_type": "eagle3", "transformer_layer_config": layer,
        "draft_vocab_size": SMALL, "eagle_aux_hidden_state_layer_ids": [2, 2, 3],
        "speculators_config": {"algorithm": "eagle3"},
    }  # fmt: skip
    (tmp_path / "head/config.json").write_text(json.dumps(outer))
    answers, proposals = run(target, **spec("eagle3", head))
    assert answers == run(target)[0]
    reference = Reference(target, tensors, third=True, before=True)
    assert all(drafts == reference.drafts(text, len(drafts)) for text, drafts in proposals)


def test_layers_that_nobody_names_and_blocks_that_are_few(target, tmp_path) -> None:
    tensors = weights(3, True, False)
    head = write(tmp_path / "head", tensors, "LlamaForCausalLMEagle3", draft_vocab_size=SMALL)
    few = {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 48}
    prompts = [*PROMPTS, *SHARED]
    answers, proposals = run(target, prompts, **few, **spec("eagle3", head, quantization="int8"))
    assert answers == run(target, prompts, **few)[0]
    assert len(proposals) > 40


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"vocab_size": 500}, "vocab_size 500 is not the target's, 512"),
        ({"target_hidden_size": 32}, "hidden_size 32 is not the target's, 64"),
        ({"architectures": ["EagleMiniCPMForCausalLM"]}, "no EAGLE head of a kind that is known"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 9]}}, "the target has 5 layers"),
    ],
)
def test_a_head_of_another_target(target, tmp_path, more, message) -> None:
    head = write(tmp_path / "head", weights(1, True, False), "LlamaForCausalLMEagle3")
    path = tmp_path / "head/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    with pytest.raises(ConfigError, match=message):
        run(target, **spec("eagle3", head))
