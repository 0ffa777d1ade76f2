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
from modulm_layers.testing import split_experts
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
        if f"{at}self_attn.q_norm.weight" in w:
            norms = (w[f"{at}self_attn.{n}_norm.weight"] for n in "qk")
            split[:2] = [rms(x, weight) for x, weight in zip(split[:2], norms, strict=True)]
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

    def combine(self, states: list[Tensor]) -> Tensor:
        return F.linear(torch.cat(states, -1), self.w["fc.weight"])

    @torch.no_grad()
    def drafts(self, history: list[int], count: int) -> list[int]:
        """What follows a text: from all its tokens, the last of which has not been run."""
        last = self.target.model(torch.tensor([history[:-1]])).last_hidden_state[0]
        hidden = last
        if self.third:
            hidden = self.combine([self.raw[i].reshape(-1, HIDDEN) for i in (1, 1, 2)])
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
@parametrize_sample(
    ("architecture", "third", "bias", "more"),
    [
        ("LlamaForCausalLMEagle3", True, False, THREE),
        ("EagleLlamaForCausalLM", False, False, {"add_para_norm": True}),
        ("LlamaForCausalLMEagle", False, True, {"bias": True}),
        ("Eagle3LlamaForCausalLM", True, False, {**THREE, "norm_before_residual": True}),
    ],
    every=4,
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


COMMON = {
    "vocab_size": WORDS, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "rms_norm_eps": EPS,
    "rope_theta": THETA, "max_position_embeddings": 64, "hidden_act": "silu",
}  # fmt: skip
LATENT = {
    "num_key_value_heads": HEADS, "kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16, "v_head_dim": 20, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
#: Head -> (transformers' model of its layers, the keys of its config.json, those that only
#: transformers' has, norms before `fc`).
HEADS_OF_FAMILIES = {
    "EagleMistralForCausalLM": ("mistral", {"sliding_window": None}, {}, ()),
    "EagleCohereForCausalLM": ("cohere", {"logit_scale": 0.5}, {}, ()),
    "EagleMiniCPMForCausalLM": (
        "granite",
        {"scale_emb": 1.0, "scale_depth": 1.4, "mup_denominator": 4, "dim_model_base": 64},
        {"residual_multiplier": 0.7, "attention_multiplier": DIM**-0.5},
        ("input_norm1", "input_norm2"),
    ),
    "EagleDeepSeekMTPModel": (
        "deepseek_v3", LATENT, {"first_k_dense_replace": 0}, ("enorm", "hnorm")
    ),
    "EagleMistralLarge3ForCausalLM": (
        "deepseek_v3", {**LATENT, "first_k_dense_replace": 1}, {}, ()
    ),
    "EagleLlama4ForCausalLM": (
        "llama4_text",
        {"head_dim": DIM, "intermediate_size_mlp": INNER, "moe_layers": [], "no_rope_layers": [1]},
        {}, (),
    ),
}  # fmt: skip


class FamilyReference:
    """A head with the layers of a family: transformers' model on what `fc` gives."""

    def __init__(self, folder, architecture: str) -> None:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

        kind, own, theirs, norms = HEADS_OF_FAMILIES[architecture]
        self.target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        table = {**COMMON, **own}
        config = AutoConfig.for_model(kind, **{**table, **theirs, "pad_token_id": 0})
        config._attn_implementation = "eager"
        draw = torch.Generator().manual_seed(5)
        self.model = AutoModel.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                drawn = torch.randn(tensor.shape, generator=draw)
                plain = tensor.dim() < 2
                tensor.copy_(1 + 0.2 * drawn if plain else 1.5 * drawn / tensor.shape[-1] ** 0.5)
                if name.endswith("correction_bias"):
                    tensor.copy_(0.1 * drawn)
        layers = "eagle_layers" if kind == "granite" else "layers"
        parts = {
            name.replace("layers.", f"{layers}."): tensor
            for name, tensor in split_experts(self.model.state_dict()).items()
            if "embed_tokens" not in name
        }
        bias = {"fc.bias": torch.randn(HIDDEN, generator=draw)} if kind == "cohere" else {}
        self.fc = torch.randn(HIDDEN, 2 * HIDDEN, generator=draw) * 0.15, bias.get("fc.bias")
        self.norms = [1 + 0.2 * torch.randn(HIDDEN, generator=draw) for _ in norms]
        before = {f"{n}.weight": t for n, t in zip(norms, self.norms, strict=True)}
        self.stored = {f"model.{n}": t for n, t in {**parts, **bias, **before}.items()}
        self.stored["model.fc.weight"] = self.fc[0]
        self.table = {**table, "model_type": kind}
        if kind == "granite":
            self.model.norm = torch.nn.Identity()

    @torch.no_grad()
    def drafts(self, history: list[int], count: int) -> list[int]:
        hidden = self.target.model(torch.tensor([history[:-1]])).last_hidden_state[0]
        tokens, drafted = history[1:], []
        while len(drafted) < count:
            embedded = self.target.model.embed_tokens(torch.tensor(tokens))
            both = [embedded, hidden]
            if self.norms:
                both = [rms(x, weight) for x, weight in zip(both, self.norms, strict=True)]
            x = F.linear(torch.cat(both, -1), *self.fc)
            state = self.model(inputs_embeds=x[None]).last_hidden_state[0, -1]
            drafted.append(int(self.target.lm_head(state).argmax()))
            hidden, tokens = torch.cat([hidden, state[None]]), [*tokens, drafted[-1]]
        return drafted


@parametrize_sample("architecture", HEADS_OF_FAMILIES, every=6)
def test_heads_with_the_layers_of_a_family(target, tmp_path, architecture) -> None:
    reference = FamilyReference(target, architecture)
    head = write(tmp_path / "head", reference.stored, architecture, **reference.table)
    answers, proposals = run(target, **spec("eagle", head))
    assert answers == run(target)[0]
    assert len(proposals) > 40
    for history, drafts in proposals[::3]:
        assert drafts == reference.drafts(history, len(drafts))


class LatentReference(Reference):
    """EAGLE-3 with transformers' attention of DeepSeek-V3, which reads both inputs."""

    def __init__(self, folder, tensors, **settings) -> None:
        from transformers import AutoConfig
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as models

        super().__init__(folder, tensors, third=True, **settings)
        config = AutoConfig.for_model("deepseek_v3", **{**COMMON, **LATENT})
        config._attn_implementation = "sdpa"
        self.rotary = models.DeepseekV3RotaryEmbedding(config)
        self.attention = models.DeepseekV3Attention(config, 0)
        for name in ("q_a_proj", "kv_a_proj_with_mqa"):
            outputs = getattr(self.attention, name).out_features
            setattr(self.attention, name, torch.nn.Linear(2 * HIDDEN, outputs, bias=False))
        draw = torch.Generator().manual_seed(7)
        for name, weight in self.attention.state_dict().items():
            drawn = torch.randn(weight.shape, generator=draw)
            weight.copy_(1 + 0.2 * drawn if weight.dim() < 2 else drawn / weight.shape[-1] ** 0.5)
            tensors[f"midlayer.self_attn.{name}"] = weight
        for index in range(3):
            tensors[f"fc_norm.{index}.weight"] = 1 + 0.2 * torch.randn(HIDDEN, generator=draw)
        self.w |= tensors

    def states(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        return rms(super().states(hidden, tokens), self.w["norm.weight"])

    def layer(self, x: Tensor, residual: Tensor) -> Tensor:
        turns = self.rotary(x, torch.arange(len(x))[None])
        seen = self.attention(x[None], position_embeddings=turns, attention_mask=None)[0][0]
        residual, w, at = residual + seen, self.w, "midlayer."
        x = rms(residual, w[f"{at}post_attention_layernorm.weight"])
        gate = F.silu(F.linear(x, w[f"{at}mlp.gate_proj.weight"]))
        inner = gate * F.linear(x, w[f"{at}mlp.up_proj.weight"])
        return residual + F.linear(inner, w[f"{at}mlp.down_proj.weight"])

    def token(self, state: Tensor) -> int:
        draft_id = F.linear(state, self.w["lm_head.weight"]).argmax()
        return int(draft_id + self.w["d2t"][draft_id])

    def combine(self, states: list[Tensor]) -> Tensor:
        normed = [rms(x, self.w[f"fc_norm.{i}.weight"]) for i, x in enumerate(states)]
        return super().combine(normed)


class ParallelReference(Reference):
    """P-EAGLE: all tokens in one step, from mask tokens with a learned state."""

    @torch.no_grad()
    def drafts(self, history: list[int], count: int) -> list[int]:
        self.target.model(torch.tensor([history[:-1]]))
        hidden = self.combine([self.raw[i].reshape(-1, HIDDEN) for i in (1, 1, 2)])
        mask = self.combine(list(self.w["mask_hidden"].view(3, 1, HIDDEN)))
        tokens = [*history[1:], *[MASK] * (count - 1)]
        states = self.states(torch.cat([hidden, *[mask] * (count - 1)]), tokens)
        return [self.token(state) for state in states[-count:]]


MASK = 7


@pytest.mark.parametrize("architecture", ["PeagleQwen3ForCausalLM"])
def test_a_head_that_drafts_all_tokens_in_one_step(target, tmp_path, architecture) -> None:
    tensors = weights(6, True, False)
    tensors["mask_hidden"] = torch.randn(1, 1, 3 * HIDDEN)
    tensors |= {f"midlayer.self_attn.{n}_norm.weight": 1 + torch.rand(DIM) for n in "qk"}
    head = write(tmp_path / "head", tensors, architecture, **THREE, ptd_token_id=MASK)
    answers, proposals = run(target, **spec("eagle3", head))
    assert answers == run(target)[0]
    reference = ParallelReference(target, tensors, third=True)
    assert len(proposals) > 40
    for history, drafts in proposals[::3]:
        assert drafts == reference.drafts(history, len(drafts))


@pytest.mark.exhaustive
@torch.no_grad()
def test_an_eagle_3_head_with_latent_attention(target, tmp_path) -> None:
    tensors = {n: t for n, t in weights(4, True, False).items() if "self_attn" not in n}
    reference = LatentReference(target, tensors)
    more = {**LATENT, **THREE, "fc_norm": True, "norm_output": True}
    head = write(tmp_path / "head", tensors, "Eagle3DeepseekV2ForCausalLM", **more)
    answers, proposals = run(target, **spec("eagle3", head))
    assert answers == run(target)[0]
    assert len(proposals) > 40
    for history, drafts in proposals[::3]:
        assert drafts == reference.drafts(history, len(drafts))


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
        ({"architectures": ["EagleOtherForCausalLM"]}, "no EAGLE head of a kind that is known"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 9]}}, "the target has 5 layers"),
    ],
)
def test_a_head_of_another_target(target, tmp_path, more, message) -> None:
    head = write(tmp_path / "head", weights(1, True, False), "LlamaForCausalLMEagle3")
    path = tmp_path / "head/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    with pytest.raises(ConfigError, match=message):
        run(target, **spec("eagle3", head))
