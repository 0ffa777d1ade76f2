"""DFlash and DSpark heads in the layouts in which they are published, against plain torch."""

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
from modulm_speculation.step.planner import DraftPlanner
from modulm_speculator_dflash.speculator import HEADS, DFlash

HIDDEN, INNER, HEADS_, KV, WORDS, SMALL = 64, 96, 4, 2, 512, 200
DIM, EPS, THETA, MASK, COUNT = HIDDEN // HEADS_, 1e-5, 1e4, 500, 4
LAYERS, AUX = 2, (0, 2)
PROMPTS = [[5, 99, 7, 300], [17], [8, 3] * 21, list(range(100, 150)), [3, 4, 5]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SIZES = {"max_model_len": 128, "max_num_batched_tokens": 32, "block_size": 16, "dtype": "float32"}


def draw(seed: int):
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int, gain: float = 1.5) -> Tensor:
        return torch.randn(*shape, generator=generator) * gain / shape[-1] ** 0.5

    def norm(size: int = HIDDEN) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    return matrix, norm


def backbone(conv: bool = False, sinks: bool = False) -> dict[str, Tensor]:
    """Tensors of the layers of a head's file."""
    matrix, norm = draw(1)
    w = {"fc.weight": matrix(HIDDEN, HIDDEN * len(AUX)), "hidden_norm.weight": norm()}
    w["norm.weight"] = norm()
    for i in range(LAYERS):
        at = f"layers.{i}."
        w |= {
            f"{at}self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{at}self_attn.k_proj.weight": matrix(KV * DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": matrix(KV * DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{at}self_attn.q_norm.weight": norm(DIM),
            f"{at}self_attn.k_norm.weight": norm(DIM),
            f"{at}mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": matrix(HIDDEN, INNER),
            f"{at}input_layernorm.weight": norm(),
            f"{at}post_attention_layernorm.weight": norm(),
        }
        if sinks:
            w[f"{at}self_attn.attention_sink_bias"] = matrix(HEADS_, gain=3)
        for name in ("attention_conv", "mlp_conv") if conv else ():
            w[f"{at}{name}.base_kernel"] = matrix(2, 3, HIDDEN, gain=4)
            w[f"{at}{name}.kernel_projection.weight"] = matrix(2 * 3 * 8, HIDDEN)
    return w


def markov() -> dict[str, Tensor]:
    matrix, _ = draw(2)
    tokens = torch.randperm(WORDS, generator=torch.Generator().manual_seed(3))[:SMALL].sort().values
    return {
        "markov_head.markov_w1.weight": matrix(WORDS, 8, gain=6),
        "markov_head.markov_w2.weight": matrix(SMALL, 8, gain=6),
        "lm_head.weight": matrix(SMALL, HIDDEN),
        "d2t": tokens - torch.arange(SMALL),
        "t2d": torch.zeros(WORDS, dtype=torch.bool),
        "confidence_head.proj.weight": matrix(1, HIDDEN),
    }


def candidates() -> dict[str, Tensor]:
    matrix, _ = draw(4)
    return {
        "candidate_selector.predecessor_codebook": matrix(WORDS, 8, gain=6),
        "candidate_selector.successor_codebook": matrix(WORDS, 8, gain=6),
        "candidate_selector.hidden_projection.weight": matrix(8, HIDDEN),
    }


def refiner() -> dict[str, Tensor]:
    matrix, _ = draw(5)
    at = "xpress_head."
    return {
        f"{at}w1.weight": matrix(WORDS, 8, gain=6), f"{at}w2.weight": matrix(WORDS, 8, gain=6),
        f"{at}down_h.weight": matrix(8, HIDDEN), f"{at}down_g.weight": matrix(8, HIDDEN),
        f"{at}in_proj.weight": matrix(8, 24), f"{at}mix.L": matrix(8, 8, 8),
        f"{at}mlp.gate_proj.weight": matrix(16, 8), f"{at}mlp.up_proj.weight": matrix(16, 8),
        f"{at}mlp.down_proj.weight": matrix(8, 16),
    }  # fmt: skip


def lattice() -> dict[str, Tensor]:
    matrix, norm = draw(6)
    at, inner, k, block = "lilicorr.", 32, 4, 8
    shapes = {
        "token_proj": (inner, HIDDEN), "pass_hidden_proj": (inner, HIDDEN),
        "feature_mlp.up_proj": (inner, 5), "feature_mlp.down_proj": (inner, inner),
        "context_proj": (inner, HIDDEN), "layers.0.attn.out_proj": (inner, inner),
        "layers.0.mlp.up_proj": (64, inner), "layers.0.mlp.down_proj": (inner, 64),
        "factor_input_proj": (inner, 3 * inner), "out_head": (16, inner), "in_head": (16, inner),
        "anchor_out_head": (16, inner),
    }  # fmt: skip
    w = {f"{at}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
    w |= {f"{at}{name}.bias": matrix(shape[0]) for name, shape in shapes.items()}
    for name in ("layers.0.attn_norm", "layers.0.mlp_norm", "output_norm", "anchor_norm"):
        w[f"{at}{name}.weight"] = norm(inner)
    w |= {
        f"{at}feature_norm.weight": norm(5), f"{at}feature_norm.bias": norm(5) - 1,
        f"{at}layers.0.attn.in_proj_weight": matrix(3 * inner, inner),
        f"{at}layers.0.attn.in_proj_bias": matrix(3 * inner),
        f"{at}slot_embedding": matrix(1, 1, block - 1, 1, inner),
        f"{at}rank_embedding": matrix(1, 1, 1, k, inner),
        f"{at}relative_slot_bias": matrix(2, 2 * block - 1), f"{at}same_slot_bias": matrix(2),
    }  # fmt: skip
    return w


def laguna() -> dict[str, Tensor]:
    """The backbone with norms of the target's states and gates of the heads."""
    matrix, norm = draw(7)
    w = backbone() | {f"aux_hidden_norms.{i}.weight": norm() for i in range(len(AUX))}
    gates = {f"layers.{i}.self_attn.g_proj.weight": matrix(HEADS_, HIDDEN) for i in range(LAYERS)}
    return w | gates


def latent() -> dict[str, Tensor]:
    """The backbone with DeepSeek's attention: ranks 24 and 32, 16 + 8 dimensions, values of 12."""
    matrix, norm = draw(8)
    w = {k: v for k, v in backbone().items() if "self_attn" not in k}
    names = (("fc", "context_proj"), ("hidden_norm", "context_norm"), ("norm", "final_norm"))
    for old, new in names:
        w[f"{new}.weight"] = w.pop(f"{old}.weight")
    for i in range(LAYERS):
        at = f"layers.{i}.self_attn."
        w |= {
            f"{at}q_a_proj.weight": matrix(24, HIDDEN),
            f"{at}q_a_layernorm.weight": norm(24),
            f"{at}q_b_proj.weight": matrix(HEADS_ * 24, 24),
            f"{at}kv_a_proj_with_mqa.weight": matrix(40, HIDDEN),
            f"{at}kv_a_layernorm.weight": norm(32),
            f"{at}kv_b_proj.weight": matrix(HEADS_ * 28, 32),
            f"{at}o_proj.weight": matrix(HIDDEN, HEADS_ * 12),
        }
    return w | full_markov()


def gemma() -> dict[str, Tensor]:
    """The backbone with Gemma 4's norms, the second layer with one weight for keys and values."""
    matrix, norm = draw(9)
    w = backbone() | full_markov() | {"embed_tokens.weight": matrix(WORDS, HIDDEN)}
    w["lm_head.weight"] = matrix(WORDS, HIDDEN)
    for i in range(LAYERS):
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            w[f"layers.{i}.{name}.weight"] = norm()
        w[f"layers.{i}.layer_scalar"] = torch.tensor([0.8 + 0.1 * i])
    del w["layers.1.self_attn.v_proj.weight"]
    return w


def full_markov() -> dict[str, Tensor]:
    matrix, _ = draw(10)
    names = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    return {name: matrix(WORDS, 8, gain=6) for name in names}


def write(folder, tensors, architecture, **more) -> str:
    table = {
        "architectures": [architecture], "model_type": "qwen3", "vocab_size": WORDS,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS_, "num_key_value_heads": KV, "rms_norm_eps": EPS,
        "rope_theta": THETA, "max_position_embeddings": 64, "hidden_act": "silu",
        "mask_token_id": MASK, "target_layer_ids": list(AUX), **more,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(table))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: Tensor, first: int) -> Tensor:
    """x: [heads, tokens, dim], turned by its positions from `first`."""
    places = first + torch.arange(x.shape[1])
    angles = places[:, None] / THETA ** (torch.arange(0, DIM, 2) / DIM)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Reference:
    """A head in plain torch: whole texts, no cache, from the equations of its authors."""

    def __init__(self, folder, tensors, table):
        from transformers import AutoModelForCausalLM

        self.target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.w, self.table = tensors, {**table, **table.get("dflash_config", {})}
        self.raw: dict[int, Tensor] = {}
        for index, layer in enumerate(self.target.model.layers):
            layer.register_forward_hook(lambda _m, _a, out, i=index: self.raw.update({i: out}))

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def attend(self, at: str, x: Tensor, context: Tensor, index: int) -> Tensor:
        both = torch.cat([context, x])
        q = self.linear(f"{at}q_proj", x).view(len(x), -1, DIM).transpose(0, 1)
        k, v = (
            self.linear(f"{at}{n}_proj", both).view(len(both), -1, DIM).transpose(0, 1)
            for n in "kv"
        )
        q = rotate(rms(q, self.w[f"{at}q_norm.weight"]), len(context))
        k = rotate(rms(k, self.w[f"{at}k_norm.weight"]), 0)
        k, v = (t.repeat_interleave(HEADS_ // KV, 0) for t in (k, v))
        v = v * self.table.get("attention_value_scale", 1)
        apart = torch.arange(len(context), len(both))[:, None] - torch.arange(len(both))
        kinds = self.table.get("layer_types")
        sliding = kinds is not None and kinds[index] == "sliding_attention"
        visible = torch.ones_like(apart, dtype=torch.bool)
        if self.table.get("causal", sliding):
            visible &= apart >= 0
        if sliding:
            visible &= apart.abs() < self.table["sliding_window"]
        scores = (q @ k.transpose(1, 2) / DIM**0.5).masked_fill(~visible, -torch.inf)
        sinks = self.w.get(f"{at}attention_sink_bias")
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(x), 1)], -1)
        seen = (scores.softmax(-1)[..., : len(both)] @ v).transpose(0, 1)
        if f"{at}g_proj.weight" in self.w:
            seen = seen * F.softplus(self.linear(f"{at}g_proj", x))[..., None]
        return self.linear(f"{at}o_proj", seen.flatten(1))

    def convolve(self, at: str, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        base = self.w[f"{at}.base_kernel"][side]
        out = torch.zeros_like(x)
        for place in range(len(x)):
            for tap in range(min(3, place + 1)):
                weight = base[tap] + kernels[place, side, tap].repeat_interleave(8)
                out[place] += weight * x[place - tap]
        return out

    def branch(self, name: str, x: Tensor, run) -> Tensor:
        if f"{name}.base_kernel" not in self.w:
            return run(x)
        kernels = self.linear(f"{name}.kernel_projection", x).view(len(x), 2, 3, 8)
        return self.convolve(name, run(self.convolve(name, x, kernels, 0)), kernels, 1)

    def states(self, context: Tensor, tokens: list[int]) -> Tensor:
        x = self.target.model.embed_tokens(torch.tensor(tokens))
        for i in range(LAYERS):
            at = f"layers.{i}."
            normed = rms(x, self.w[f"{at}input_layernorm.weight"])
            x = x + self.branch(
                f"{at}attention_conv",
                normed,
                lambda y, at=at, i=i: self.attend(f"{at}self_attn.", y, self.of(context, i), i),
            )
            normed = rms(x, self.w[f"{at}post_attention_layernorm.weight"])
            x = x + self.branch(f"{at}mlp_conv", normed, lambda y, at=at: self.mlp(f"{at}mlp.", y))
        return rms(x, self.w["norm.weight"])

    def mlp(self, at: str, x: Tensor) -> Tensor:
        inner = F.silu(self.linear(f"{at}gate_proj", x)) * self.linear(f"{at}up_proj", x)
        return self.linear(f"{at}down_proj", inner)

    @torch.no_grad()
    def drafts(self, history: list[int], masks: int) -> list[int]:
        """What follows a text: from all its tokens, the last of which has not been run."""
        self.target.model(torch.tensor([history[:-1]]))
        context = self.combine([self.raw[i].reshape(-1, HIDDEN) for i in AUX])
        states = self.states(context, [history[-1], *[MASK] * masks])
        return self.choose(states, history[-1], context[-1])

    def combine(self, states: list[Tensor]) -> Tensor:
        return rms(self.linear("fc", torch.cat(states, -1)), self.w["hidden_norm.weight"])

    def of(self, context: Tensor, index: int) -> Tensor:
        return context

    def head(self, states: Tensor) -> Tensor:
        return self.linear("lm_head", states) if "lm_head.weight" in self.w else (
            self.target.lm_head(states)
        )  # fmt: skip

    def choose(self, states: Tensor, anchor: int, context: Tensor) -> list[int]:
        return self.head(states[1:]).argmax(-1).tolist()


class Markov(Reference):
    def choose(self, states, anchor, context):
        drafts = []
        for state in states if self.table.get("sample_from_anchor", True) else states[1:]:
            before = self.w["markov_head.markov_w1.weight"][anchor]
            token = (self.head(state) + self.linear("markov_head.markov_w2", before)).argmax()
            drafts.append(anchor := int(token + self.w["d2t"][token] if "d2t" in self.w else token))
        return drafts


class Laguna(Reference):
    def combine(self, states):
        norms = [self.w[f"aux_hidden_norms.{i}.weight"] for i in range(len(states))]
        return super().combine([rms(x, norm) for x, norm in zip(states, norms, strict=True)])

    def of(self, context, index):
        return rms(context, self.w[f"layers.{index}.input_layernorm.weight"])


def in_pairs(x: Tensor, first: int) -> Tensor:
    """Turn neighbouring dimensions; see `rotate`. x: [heads, tokens, 8]."""
    places = first + torch.arange(x.shape[1])
    angles = places[:, None] / THETA ** (torch.arange(0, 8, 2) / 8)
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


class Latent(Markov):
    def __init__(self, folder, tensors, table):
        names = {"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}
        renamed = {
            names.get(k.removesuffix(".weight"), "") + ".weight": v for k, v in tensors.items()
        }
        super().__init__(folder, tensors | renamed, table)

    def attend(self, at, x, context, index):
        both, count = torch.cat([context, x]), len(x)
        compressed = rms(self.linear(f"{at}q_a_proj", x), self.w[f"{at}q_a_layernorm.weight"])
        q = self.linear(f"{at}q_b_proj", compressed).view(count, HEADS_, 24).transpose(0, 1)
        low, turned = self.linear(f"{at}kv_a_proj_with_mqa", both).split([32, 8], -1)
        wide = self.linear(f"{at}kv_b_proj", rms(low, self.w[f"{at}kv_a_layernorm.weight"]))
        k, v = wide.view(len(both), HEADS_, 28).transpose(0, 1).split([16, 12], -1)
        shared = in_pairs(turned[None], 0).expand(HEADS_, -1, -1)
        q = torch.cat([q[..., :16], in_pairs(q[..., 16:], len(context))], -1)
        scores = q @ torch.cat([k, shared], -1).transpose(1, 2) / 24**0.5
        return self.linear(f"{at}o_proj", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))


class Gemma(Markov):
    def states(self, context, tokens):
        x = self.w["embed_tokens.weight"][torch.tensor(tokens)] * HIDDEN**0.5
        for i in range(LAYERS):
            at = f"layers.{i}."
            norm = {n: self.w[f"{at}{n}_layernorm.weight"] for n in (
                "post_attention", "pre_feedforward", "post_feedforward")}  # fmt: skip
            seen = self.attend(
                f"{at}self_attn.", rms(x, self.w[f"{at}input_layernorm.weight"]), context, i
            )
            x = x + rms(seen, norm["post_attention"])
            y = rms(x, norm["pre_feedforward"])
            inner = F.gelu(self.linear(f"{at}mlp.gate_proj", y), approximate="tanh")
            y = self.linear(f"{at}mlp.down_proj", inner * self.linear(f"{at}mlp.up_proj", y))
            x = (x + rms(y, norm["post_feedforward"])) * self.w[f"{at}layer_scalar"]
        return rms(x, self.w["norm.weight"])

    def attend(self, at, x, context, index):
        both = torch.cat([context, x])
        names = "qkk" if index else "qkv"
        q, k, v = (
            self.linear(f"{at}{n}_proj", y).view(len(y), -1, DIM).transpose(0, 1)
            for n, y in zip(names, (x, both, both), strict=True)
        )
        q = rotate(rms(q, self.w[f"{at}q_norm.weight"]), len(context))
        k = rotate(rms(k, self.w[f"{at}k_norm.weight"]), 0)
        k, v = (t.repeat_interleave(HEADS_ // KV, 0) for t in (k, rms(v, torch.ones(DIM))))
        seen = ((q @ k.transpose(1, 2)).softmax(-1) @ v).transpose(0, 1)
        return self.linear(f"{at}o_proj", seen.flatten(1))

    def choose(self, states, anchor, context):
        drafts, cap = [], self.table["final_logit_softcapping"]
        for state in states:
            before = self.w["markov_head.markov_w1.weight"][anchor]
            both = self.head(state), self.linear("markov_head.markov_w2", before)
            drafts.append(anchor := int(sum(cap * torch.tanh(x / cap) for x in both).argmax()))
        return drafts


class Candidates(Reference):
    def choose(self, states, anchor, context):
        drafts, at = [], "candidate_selector."
        cap = self.table["final_logit_softcapping"]
        for state in states[1:]:
            logits = cap * torch.tanh(self.head(state) * self.table["output_multiplier"] / cap)
            best, tokens = logits.topk(self.table["selector_top_k"])
            before = self.w[f"{at}predecessor_codebook"][anchor]
            before = before * self.linear(f"{at}hidden_projection", state)
            scores = best + self.w[f"{at}successor_codebook"][tokens] @ before
            drafts.append(anchor := int(tokens[scores.argmax()]))
        return drafts


class Refined(Reference):
    def choose(self, states, anchor, context):
        at, logits = "xpress_head.", self.head(states[1:])
        tokens = logits.argmax(-1)
        mean = states.mean(0, keepdim=True).expand_as(states)
        hidden = torch.cat(
            [self.linear(f"{at}down_h", states), self.linear(f"{at}down_g", mean)], -1
        )
        mix = self.w[f"{at}mix.L"][:, : len(states), : len(states)].tril()
        for _ in range(self.table["xpress_num_passes"]):
            before = torch.cat([torch.tensor([anchor, anchor]), tokens[:-1]])
            joined = torch.cat([hidden, self.w[f"{at}w1.weight"][before]], -1)
            x = self.linear(f"{at}in_proj", joined)
            x = x + torch.einsum("rij,jr->ir", mix, x)
            x = x + self.mlp(f"{at}mlp.", x)
            count = self.table["xpress_topc"]
            best, some = logits.topk(count, -1)
            scores = best + (self.w[f"{at}w2.weight"][some] @ x[1:, :, None])[..., 0]
            tokens = some.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
        return tokens.tolist()


class Correlated(Reference):
    def choose(self, states, anchor, context):
        k, at, count = 4, "lilicorr.", len(states) - 1
        logs, tokens = self.head(states[1:]).log_softmax(-1).topk(k, -1)
        x = self.linear(f"{at}token_proj", self.target.model.embed_tokens(tokens))
        x = x + self.linear(f"{at}pass_hidden_proj", states[1:])[:, None]
        order = (torch.arange(k) / (k - 1)).expand(count, k)
        first = torch.tensor([1.0, 0, 0, 0]).expand(count, k)
        parts = [logs, logs.exp(), logs - logs[:, :1], order, first]
        features = F.layer_norm(
            torch.stack(parts, -1), (5,), self.w[f"{at}feature_norm.weight"],
            self.w[f"{at}feature_norm.bias"],
        )  # fmt: skip
        x = x + self.plain(f"{at}feature_mlp.", features)
        x = x + self.w[f"{at}slot_embedding"][0, 0, :count] + self.w[f"{at}rank_embedding"][0, 0]
        x = x.flatten(0, 1)
        slot = torch.arange(count).repeat_interleave(k)
        apart = slot[:, None] - slot
        bias = self.w[f"{at}relative_slot_bias"][:, apart + 7]
        bias = bias + (apart == 0) * self.w[f"{at}same_slot_bias"][:, None, None]
        here = f"{at}layers.0."
        qkv = F.linear(
            rms(x, self.w[f"{here}attn_norm.weight"]), self.w[f"{here}attn.in_proj_weight"],
            self.w[f"{here}attn.in_proj_bias"],
        )  # fmt: skip
        q, k_, v = (t.view(len(x), 2, -1).transpose(0, 1) for t in qkv.chunk(3, -1))
        seen = ((q @ k_.transpose(1, 2)) / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v
        x = x + self.linear(f"{here}attn.out_proj", seen.transpose(0, 1).flatten(1))
        x = x + self.plain(f"{here}mlp.", rms(x, self.w[f"{here}mlp_norm.weight"]))
        x = rms(x, self.w[f"{at}output_norm.weight"]).view(count, k, -1)
        start = rms(self.linear(f"{at}context_proj", context), self.w[f"{at}anchor_norm.weight"])
        joined = torch.cat([x, start.expand_as(x), x * start], -1)
        inner = F.silu(self.linear(f"{at}factor_input_proj", joined))
        out, into = (
            F.normalize(self.linear(f"{at}{n}_head", inner), dim=-1) for n in ("out", "in")
        )
        before, drafts = F.normalize(self.linear(f"{at}anchor_out_head", start), dim=-1), []
        for place in range(count):
            index = int((into[place] @ before).argmax())
            drafts.append(int(tokens[place, index]))
            before = out[place, index]
        return drafts

    def plain(self, at: str, x: Tensor) -> Tensor:
        return self.linear(f"{at}down_proj", F.silu(self.linear(f"{at}up_proj", x)))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dflash") / "target"
    return str(make_tiny(folder, num_hidden_layers=4))


def run(folder, prompts=PROMPTS, **flags):
    """Tokens of all prompts; each text that was drafted for, with its drafts and masks."""
    proposals: list[tuple[list[int], list[int]]] = []
    masks: list[int] = []
    settle, lengths = DraftPlanner.settle, DFlash._blocks

    def recorded(planner, rows, ends, owners):
        alive = set(owners.tolist())
        proposals.extend(
            (planner._table.history(row).tolist(), tokens.tolist())
            for row, tokens in planner._proposals.items() if row in alive
        )  # fmt: skip
        settle(planner, rows, ends, owners)

    def measured(drafter, *arguments):
        blocks = lengths(drafter, *arguments)
        masks.extend(blocks[blocks > 0].tolist())
        return blocks

    with (
        patch.object(DraftPlanner, "settle", recorded),
        patch.object(DFlash, "_blocks", measured),
        LLM(folder, **{"num_gpu_blocks_override": 60, **SIZES, **flags}) as llm,
    ):
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = [o.outputs[0].token_ids for o in llm.generate(requests, GREEDY, use_tqdm=False)]
    return answers, proposals, masks


def spec(method, model, **more):
    table = {"method": method, "model": model, "adaptive": False, "num_speculative_tokens": COUNT}
    return {"speculative_config": {**table, **more}}


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
MIXED = {"attention_value_scale": 0.7, "attention_sink_bias": True}
PAIRS = {"selector_rank": 8, "selector_top_k": 5, "output_multiplier": 0.8,
         "final_logit_softcapping": 4.0, "conv_kernel_size": 3, "conv_group_size": 8}  # fmt: skip
PASSES = {"xpress_rank": 8, "xpress_mlp_hidden": 16, "xpress_num_passes": 3, "xpress_topc": 64,
          "xpress_block_size": 8}  # fmt: skip
LATTICE = {"lilicorr_hidden_size": 32, "lilicorr_num_heads": 2, "lilicorr_mlp_ratio": 2.0,
           "lilicorr_num_layers": 1, "lilicorr_candidate_topk": 4, "lilicorr_factor_dim": 16,
           "lilicorr_vector_eps": 1e-12, "block_size": 8}  # fmt: skip
SMALL_HEAD = {"draft_vocab_size": SMALL, "markov_rank": 8}
RANKS = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
         "v_head_dim": 12, "num_key_value_heads": HEADS_, "markov_rank": 8}  # fmt: skip
TURNS = {"rope_type": "default", "rope_theta": THETA}
TWO_KINDS = {
    "markov_rank": 8, "head_dim": DIM, "global_head_dim": DIM, "num_global_key_value_heads": KV,
    "attention_k_eq_v": True, "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 500, "final_logit_softcapping": 3.0, "dflash_config": {"causal": False},
    "rope_parameters": {"sliding_attention": TURNS, "full_attention": TURNS},
}  # fmt: skip
#: Architecture, tensors, reference, keys of config.json.
LAYOUTS = [
    ("DFlashDraftModel", backbone, Reference, {}),
    ("DFlashDraftModel", lambda: backbone(sinks=True), Reference,
     {**SLIDING, "dflash_config": MIXED}),
    ("Qwen3DSparkModel", lambda: backbone() | markov(), Markov, SMALL_HEAD),
    ("DFlash2DraftModel", lambda: backbone(conv=True) | candidates(), Candidates,
     {"dflash_config": PAIRS}),
    ("Qwen3XPressModel", lambda: backbone() | refiner(), Refined, PASSES),
    ("LiLiCorrDraftModel", lambda: backbone() | lattice(), Correlated,
     {"dflash_config": LATTICE}),
    ("DFlashLagunaForCausalLM", laguna, Laguna, {}),
    ("K3DSparkModel", latent, Latent, RANKS),
    ("Gemma4DSparkModel", gemma, Gemma, TWO_KINDS),
]  # fmt: skip


@parametrize_sample(
    ("architecture", "tensors", "reference", "more"), LAYOUTS, every=5,
    ids=["dflash", "sliding", "dspark", "dflash2", "xpress", "lilicorr", "laguna", "k3", "gemma4"],
)  # fmt: skip
def test_drafts_are_those_of_plain_torch(target, tmp_path, architecture, tensors, reference, more):
    weights = tensors()
    head = write(tmp_path / "head", weights, architecture, **more)
    answers, proposals, blocks = run(target, **spec("dflash", head))
    assert answers == run(target)[0]
    plain = reference(target, weights, json.loads((tmp_path / "head/config.json").read_text()))
    given = 0 if "DSpark" in architecture else 1
    assert len(proposals) > 40
    wrong = 0
    for history, drafts in proposals:
        # Near the end of a row's blocks, a block has fewer masks.
        lengths = sorted({COUNT + given, *blocks}, reverse=True)
        expected = [plain.drafts(history, n - 1) for n in lengths if n - given >= len(drafts)]
        wrong += drafts not in [each[: len(drafts)] for each in expected]
    assert wrong == 0
    assert blocks.count(COUNT + given) > len(blocks) / 2


def test_speculators_library_files_and_separate_masks(target, tmp_path):
    """The layout of the speculators library, and an embedding of masks beside the weights."""
    weights = backbone()
    layer = {
        "model_type": "qwen3", "vocab_size": WORDS, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS_,
        "num_key_value_heads": KV, "rms_norm_eps": EPS, "rope_theta": THETA,
    }  # fmt: skip
    folder = tmp_path / "head"
    write(folder, weights, "DFlashSpeculator")
    table = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
        "transformer_layer_config": layer, "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [i + 1 for i in AUX],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(table))
    _, plain, _ = run(target, PROMPTS[:2], **spec("dflash", str(folder)))
    reference = Reference(target, weights, {"causal": False})
    assert plain
    assert all(
        drafts == reference.drafts(history, COUNT)[: len(drafts)] for history, drafts in plain
    )
    vector = reference.target.model.embed_tokens.weight[77].detach()
    torch.save({"mask_token_id": MASK, "embedding": vector}, folder / "mask_embedding.pt")
    _, masked, _ = run(target, PROMPTS[:2], **spec("dspark", str(folder)))
    assert masked != plain


@pytest.mark.parametrize(
    ("architecture", "more", "message"),
    [
        ("LlamaForCausalLM", {}, "is no DFlash head"),
        ("DFlashDraftModel", {"hidden_size": 32}, "hidden_size 32 is not the target's, 64"),
        ("DFlashDraftModel", {"target_layer_ids": [9]}, "the target has 4 layers"),
        ("DFlashDraftModel", {"mask_token_id": None}, "mask_token_id None: required"),
        ("DFlashDraftModel", {"sample_from_anchor": True}, "only DSpark heads support it"),
        ("Qwen3DSparkModel", {**SMALL_HEAD, "markov_head_type": "gated"}, "markov_head_type"),
    ],
)
def test_other_heads_are_refused(target, tmp_path, architecture, more, message):
    head = write(tmp_path / "head", {"a": torch.zeros(1)}, architecture, **more)
    with pytest.raises(ConfigError, match=message), LLM(target, **SIZES, **spec("dflash", head)):
        pass


def test_names_of_all_heads_are_listed():
    assert {"DFlashDraftModel", "MuseGlimmerAssistantModel", "DFlash2BeamDraftModel"} < set(HEADS)
