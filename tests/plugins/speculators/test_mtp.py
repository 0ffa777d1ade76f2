"""Layers that checkpoints bring for drafting: what they draft is what the papers' formulas give,
computed apart from the engine with transformers' layers, and no answer changes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve, field, frozen
from safetensors.torch import load_file, save_file
from samples import sample
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDecoderLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.ernie4_5.modeling_ernie4_5 import Ernie4_5DecoderLayer
from transformers.models.exaone4.modeling_exaone4 import Exaone4DecoderLayer
from transformers.models.exaone_moe.modeling_exaone_moe import ExaoneMoeDecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.glm_ocr.modeling_glm_ocr import GlmOcrTextDecoderLayer
from transformers.models.hy_v3.modeling_hy_v3 import HYV3DecoderLayer
from transformers.models.longcat_flash.modeling_longcat_flash import (
    LongcatFlashMLA,
    LongcatFlashMLP,
    LongcatFlashRMSNorm,
)
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import (
    MiMoV2FlashAttention,
    MiMoV2FlashMLP,
    MiMoV2FlashRMSNorm,
)
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer
from transformers.models.step3p7.modeling_step3p7 import Step3p7DecoderLayer

from modulm import LLM, SamplingParams
from modulm.config import EngineConfig
from modulm.errors import ConfigError
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm.plugins.defaults import choose_model
from modulm.testing.checkpoints import make_tiny
from modulm.testing.oracles import write_tiny
from modulm_pangu.oracle import AsDeepseekV3, add_norms
from modulm_platform_cpu.platform import CpuPlatform
from modulm_speculation.automatic import choose_speculator
from modulm_speculation.chain import ends_of
from modulm_speculator_mtp.speculator import Mtp
from modulm_stepfun.oracle import AsStep37

PROMPTS = [[5, 99, 7, 300, 41, 8], [17, 3], [8] * 12]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAFTS = 3


@frozen
class Layout:
    """Where a family's files have the layer, and what the layer is. like: the index of the model's
    layer that it is like; {n}: how many layers there are. shared: the norm is the model's own.
    written: the architecture that transformers makes the model of, if not the file's. oracle: what
    makes the model if transformers has none; its experts are chosen without a bias. rotary: further
    arguments of the model's rotary positions. attention: transformers' implementation.
    """

    layer: Callable[[Any, int], nn.Module]
    like: int
    at: str
    embedding_norm: str
    hidden_norm: str
    project: str
    norm: str
    offset: float = 0.0
    normed: bool = False
    shared: bool = False
    state_first: bool = False
    written: str = ""
    oracle: Any = None
    rotary: tuple[str, ...] = ()
    attention: str = "sdpa"
    config: Mapping[str, Any] = field(factory=dict)


def _nextn(layer: type[nn.Module], **more: Any) -> Layout:
    at = "model.layers.{n}"
    return Layout(
        layer, 2, at, f"{at}.enorm", f"{at}.hnorm", f"{at}.eh_proj", f"{at}.shared_head.norm",
        config={"num_nextn_predict_layers": 1}, **more,
    )  # fmt: skip


def _mtp(layer: Callable[[Any, int], nn.Module], offset: float = 1.0) -> Layout:
    return Layout(
        layer, 1, "mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc",
        "mtp.norm", offset=offset, normed=True,
    )  # fmt: skip


def _dense_and_full(config: Any, index: int) -> nn.Module:
    """K-EXAONE's layer, which none of the tiny model's own is like."""
    changed = copy.deepcopy(config)
    changed.layer_types = ["full_attention"] * config.num_hidden_layers
    changed.mlp_layer_types = ["dense"] * config.num_hidden_layers
    return ExaoneMoeDecoderLayer(changed, index)


def _latent_and_sparse(config: Any, index: int) -> nn.Module:
    """Ling 3.0's layer, which has latent attention and experts."""
    changed = copy.deepcopy(config)
    changed.layer_types = ["full_attention"] * config.num_hidden_layers
    return BailingHybridDecoderLayer(changed, index)


class NemotronDrafts(nn.Module):
    """Attention, then experts."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        changed = copy.deepcopy(config)
        changed.layers_block_type = ["full_attention", "moe"]
        for at in range(2):
            self.add_module(str(at), NemotronHBlock(changed, at))

    def forward(self, x: Tensor, **inputs: Any) -> Tensor:
        del inputs["position_embeddings"]
        for layer in self.children():
            x = layer(x, **inputs)
        return x


class LongcatDrafts(nn.Module):
    """DeepSeek's dense layer with LongCat's scales, and its names."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.self_attn = LongcatFlashMLA(config, index)
        self.transformer_layer = nn.ModuleDict({"mlp": LongcatFlashMLP(config)})
        self.input_layernorm = LongcatFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LongcatFlashRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, **inputs: Any) -> Tensor:
        x = x + self.self_attn(hidden_states=self.input_layernorm(x), **inputs)[0]
        out: Tensor = self.transformer_layer["mlp"](self.post_attention_layernorm(x))
        return x + out


class MimoDrafts(nn.Module):
    """MiMo V2's dense layer with a window, whose names are its own."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        changed = copy.deepcopy(config)
        changed.layer_types = ["sliding_attention"] * config.num_hidden_layers
        self.self_attn = MiMoV2FlashAttention(changed, index)
        self.mlp = MiMoV2FlashMLP(config)
        self.input_layernorm = MiMoV2FlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_mlp_layernorm = MiMoV2FlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.window = config.sliding_window

    def forward(self, x: Tensor, **inputs: Any) -> Tensor:
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        hidden = ~(seen & ~seen.tril(-self.window))
        inputs["attention_mask"] = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
        x = x + self.self_attn(self.input_layernorm(x), **inputs)[0]
        return x + self.mlp(self.pre_mlp_layernorm(x))


def _with_norms(config: Any, index: int) -> nn.Module:
    """openPangu's layer."""
    layer = DeepseekV3DecoderLayer(config, index)
    add_norms(layer, config.hidden_size, config.rms_norm_eps)
    return layer


def _unclamped(config: Any, index: int) -> nn.Module:
    """Step 3.5's dense layer, whose activations have no bounds in layers that draft."""
    layer = Step3p7DecoderLayer(config, index)
    layer.mlp.limit = float("inf")
    return layer


MIMO = "model.mtp_layers.0"
LONGCAT = "model.mtp.layers.0"
OCR = "model.language_model.layers.{n}"
NEMOTRON = "mtp.layers.0"
MIMO_V2 = "model.mtp.layers.0"
LAYOUTS = {
    "DeepseekV3ForCausalLM": _nextn(DeepseekV3DecoderLayer),
    "Glm4MoeForCausalLM": _nextn(Glm4MoeDecoderLayer),
    "HYV3ForCausalLM": evolve(
        _nextn(HYV3DecoderLayer, normed=True), norm="model.layers.{n}.final_layernorm"
    ),
    "Qwen3NextForCausalLM": _mtp(Qwen3NextDecoderLayer),
    "Qwen3_5ForCausalLM": _mtp(Qwen3_5DecoderLayer),
    "Qwen3_5MoeForCausalLM": _mtp(Qwen3_5MoeDecoderLayer),
    "Ernie4_5_MoeForCausalLM": Layout(
        Ernie4_5DecoderLayer, 0, "model.mtp_block.0", "model.mtp_emb_norm.0",
        "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", "model.norm", shared=True,
        config={"num_nextn_predict_layers": 1},
    ),
    "MiMoForCausalLM": Layout(
        Qwen2DecoderLayer, 0, MIMO, f"{MIMO}.token_layernorm", f"{MIMO}.hidden_layernorm",
        f"{MIMO}.input_proj", f"{MIMO}.final_layernorm", normed=True, state_first=True,
        written="Qwen2ForCausalLM",
    ),
    "ExaoneMoeForCausalLM": _mtp(_dense_and_full, offset=0.0),
    "Exaone4ForCausalLM": evolve(_mtp(Exaone4DecoderLayer, offset=0.0), like=0),
    "GlmOcrForConditionalGeneration": evolve(
        _nextn(GlmOcrTextDecoderLayer), at=OCR, embedding_norm=f"{OCR}.enorm",
        hidden_norm=f"{OCR}.hnorm", project=f"{OCR}.eh_proj", norm=f"{OCR}.shared_head.norm",
        config={},
    ),
    "NemotronHForCausalLM": Layout(
        NemotronDrafts, 0, "mtp.layers", f"{NEMOTRON}.enorm", f"{NEMOTRON}.hnorm",
        f"{NEMOTRON}.eh_proj", "mtp.layers.1.final_layernorm", normed=True,
    ),
    "LongcatFlashForCausalLM": Layout(
        LongcatDrafts, 0, LONGCAT, f"{LONGCAT}.enorm.m", f"{LONGCAT}.hnorm.m",
        f"{LONGCAT}.eh_proj", "model.mtp.norm", normed=True,
    ),
    "Step3p5ForCausalLM": evolve(
        _nextn(_unclamped, oracle=AsStep37, offset=1.0, rotary=("full_attention",)), like=0
    ),
    "BailingHybridForCausalLM": evolve(
        _nextn(_latent_and_sparse, normed=True), norm="model.layers.{n}.final_layernorm"
    ),
    "MiMoV2FlashForCausalLM": Layout(
        MimoDrafts, 0, MIMO_V2, f"{MIMO_V2}.enorm", f"{MIMO_V2}.hnorm", f"{MIMO_V2}.eh_proj",
        f"{MIMO_V2}.final_layernorm", normed=True, rotary=("sliding_attention",),
        attention="eager",
    ),
    "PanguUltraMoEForCausalLM": _nextn(_with_norms, oracle=AsDeepseekV3),
}  # fmt: skip


def published(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """As published files have it: each expert's maps apart."""
    if name.endswith("experts.gate_up_proj"):
        for index, both in enumerate(tensor):
            for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                yield name.replace("gate_up_proj", f"{index}.{part}.weight"), half.clone()
    elif name.endswith(("experts.up_proj", "experts.down_proj")):
        at, _, part = name.rpartition(".")
        for index, one in enumerate(tensor):
            yield f"{at}.{index}.{part}.weight", one.clone()
    else:
        name = name.replace(".mlp.e_score_correction_bias", ".mlp.expert_bias")
        yield name.replace(".self_attn.sinks", ".self_attn.attention_sink_bias"), tensor.clone()


def transformers_model(folder: str, layout: Layout) -> Any:
    """The model of a checkpoint."""
    if layout.oracle is not None:
        oracle, table = layout.oracle(), json.loads(Path(folder, "config.json").read_text())
        model = oracle._model(table)
        oracle._read(table, model, load_file(f"{folder}/model.safetensors"))
        return model
    kinds = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
    kind = kinds["{n}" in layout.at and "language_model" in layout.at]
    return kind.from_pretrained(folder, dtype=torch.float32)


class Reference:
    """A model of transformers with the layer beside it, in fp32."""

    def __init__(self, folder: str, layout: Layout) -> None:
        self.model = transformers_model(folder, layout)
        self.text = getattr(self.model.model, "language_model", self.model.model)
        config = self.config = self.text.config
        config._attn_implementation = layout.attention
        self.layout = layout
        self.count = config.num_hidden_layers
        draw = torch.Generator().manual_seed(11)
        self.layer = layout.layer(config, layout.like).eval()
        width = config.hidden_size
        self.maps = {
            name: torch.randn(width, generator=draw) * 0.1 + 1 - layout.offset
            for name in (layout.embedding_norm, layout.hidden_norm, layout.norm)
        }
        if layout.shared:
            self.maps[layout.norm] = self.text.norm.weight.detach()
        self.maps[layout.project] = torch.randn(width, 2 * width, generator=draw) * 0.2
        with torch.no_grad():
            for name, tensor in self.layer.state_dict().items():
                scale = 0.1 if "norm" in name else 0.25
                tensor.copy_(torch.randn(tensor.shape, generator=draw) * scale)
                if "norm" in name:
                    tensor += 1 - layout.offset
                if layout.oracle is not None and name.endswith("correction_bias"):
                    tensor.zero_()

    def store(self, folder: str) -> None:
        """Put the layer into the checkpoint, with copies of embedding and head beside it."""
        file = f"{folder}/model.safetensors"
        stored = load_file(file)
        at = self.layout.at
        for name, tensor in self.layer.state_dict().items():
            if self.layout.oracle is None or not name.endswith("correction_bias"):
                stored.update(published(f"{at}.{name}".format(n=self.count), tensor))
        for name, tensor in self.maps.items():
            if not (self.layout.shared and name == self.layout.norm):
                stored[f"{name}.weight".format(n=self.count)] = tensor
        if "{n}" in at:
            for name in ("embed_tokens", "shared_head.head"):
                copy = self.text.embed_tokens.weight.detach().clone()
                stored[f"{at}.{name}.weight".format(n=self.count)] = copy
        save_file(stored, file, metadata={"format": "pt"})

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.maps[name] + self.layout.offset
        eps = getattr(self.config, "rms_norm_eps", None) or self.config.layer_norm_epsilon
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def _window(self, x: Tensor) -> Tensor | None:
        """What a layer with a window sees: [tokens, tokens]. None: everything before."""
        width = getattr(getattr(self.layer, "self_attn", None), "sliding_window", None)
        if width is None or self.layout.like:
            return None
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return seen & ~seen.tril(-width)

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int]) -> list[int]:
        """What follows `tokens`, of which the last was not computed yet."""
        of, model = self.layout, self.text
        states = model(torch.tensor([tokens[:-1]])).last_hidden_state
        rotary = getattr(model, "rotary_emb", None)
        following, drafted = list(tokens[1:]), []
        for _ in range(DRAFTS):
            embedded = model.get_input_embeddings()(torch.tensor([following]))
            both = self._norm(of.embedding_norm, embedded), self._norm(of.hidden_norm, states)
            x = F.linear(torch.cat(both[:: -1 if of.state_first else 1], -1), self.maps[of.project])
            positions = torch.arange(x.shape[1])[None]
            axes = positions.expand(3, -1, -1) if model is not self.model.model else positions
            turns = None if rotary is None else rotary(x, axes, *of.rotary)
            x = self.layer(
                x, attention_mask=self._window(x), position_ids=positions, position_embeddings=turns
            )
            x = x[0] if isinstance(x, tuple) else x
            normed = self._norm(of.norm, x)
            drafted.append(int(self.model.lm_head(normed[0, -1]).argmax()))
            following.append(drafted[-1])
            states = torch.cat([states, (normed if of.normed else x)[:, -1:]], 1)
        return drafted


@pytest.fixture(scope="module", params=sample(LAYOUTS, every=6))
def draft_layer(request, tmp_path_factory):
    layout, path = LAYOUTS[request.param], tmp_path_factory.mktemp("mtp") / "tiny"
    if layout.oracle is not None:
        driver = manager.current().load("models", request.param)
        folder = str(write_tiny(driver, layout.oracle(), path))
        table = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**table, **layout.config}))
    else:
        folder = str(make_tiny(path, layout.written or request.param, **layout.config))
    reference = Reference(folder, layout)
    reference.store(folder)
    if layout.written:
        file = path / "config.json"
        settings = {"architectures": [request.param], "model_type": "mimo"}
        table = {**json.loads(file.read_text()), **settings, "num_nextn_predict_layers": 1}
        file.write_text(json.dumps(table))
    return folder, reference


def answers(folder: str, **flags: object) -> list[list[int]]:
    sizes = {"max_model_len": 96, "num_gpu_blocks_override": 48, "max_num_seqs": 8}
    with LLM(folder, dtype="float32", max_num_batched_tokens=48, **sizes, **flags) as llm:
        requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [o.outputs[0].token_ids for o in llm.generate(requests, GREEDY, use_tqdm=False)]


def test_what_is_drafted_is_what_the_layer_says(draft_layer, monkeypatch) -> None:
    folder, reference = draft_layer
    expected = answers(folder)
    seen: list[tuple[int, int, list[int]]] = []
    plain = Mtp.propose

    def propose(self, step):
        proposed = plain(self, step)
        lengths = (ends_of(step) + 1).tolist() if len(step.rows) else []
        seen.extend(zip(step.rows, lengths, [each.tolist() for each in proposed], strict=True))
        return proposed

    monkeypatch.setattr(Mtp, "propose", propose)
    table = {"method": "mtp", "num_speculative_tokens": DRAFTS, "adaptive": False}
    assert answers(folder, speculative_config=table) == expected
    # Its class is nobody else's: another engine's process could not import it.
    assert not any(d.name.startswith("draft ") for d in manager.current().names("models"))
    assert len(seen) >= 12
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    rows = {row: None for row, _, _ in seen}
    assert len(rows) == len(PROMPTS)
    whole = dict(zip(sorted(rows), texts, strict=True))
    for row, length, drafts in seen[:: max(len(seen) // 8, 1)]:
        assert drafts == reference.drafts(whole[row][:length])[: len(drafts)]
        assert drafts


@pytest.mark.parametrize(
    ("name", "draft_layer"),
    [("mimo_mtp", "MiMoForCausalLM"), ("exaone_moe_mtp", "ExaoneMoeForCausalLM")],
    indirect=["draft_layer"],
)
def test_vllm_s_names_of_it(draft_layer, name) -> None:
    folder, _ = draft_layer
    assert answers(folder, spec_method=name, spec_tokens=2) == answers(folder)


@pytest.mark.parametrize("name", ["deepseek_mtp", "qwen3_next_mtp", "mimo_mtp"])
def test_names_that_scripts_have(tmp_path, name) -> None:
    folder = str(make_tiny(tmp_path / "tiny"))
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no MTP layer"):
        LLM(folder, spec_method=name)


def test_a_layer_of_another_kind_is_refused_where_it_would_draft(tmp_path) -> None:
    kinds = {"mtp_layer_types": ["sliding_attention"], "num_nextn_predict_layers": 1}
    folder = str(make_tiny(tmp_path / "tiny", "ExaoneMoeForCausalLM", **kinds))
    assert len(answers(folder)) == len(PROMPTS)
    with pytest.raises(
        ConfigError, match="mtp_layer_types: not supported yet: draft layers with a window"
    ):
        answers(folder, spec_method="mtp")


def test_a_checkpoint_without_the_layer(tmp_path) -> None:
    folder = str(make_tiny(tmp_path / "tiny", "Qwen3NextForCausalLM"))
    with pytest.raises(ConfigError, match=r"mtp\."):
        answers(folder, spec_method="mtp")


def test_auto_uses_the_layer_if_the_files_have_it(draft_layer, tmp_path) -> None:
    without = make_tiny(tmp_path / "tiny", "Qwen3NextForCausalLM")
    plugins, decisions = manager.current(), []
    for folder in (draft_layer[0], str(without)):
        config = EngineConfig().with_(model=folder, speculative="auto")
        checkpoint = open_checkpoint(config, plugins)
        family = choose_model(plugins, checkpoint.architectures, checkpoint.config).driver
        size = {"platform": CpuPlatform, "weight_bytes": 0}
        decisions.append(choose_speculator(config, checkpoint, family, plugins, **size)[0])
    assert [decision.winner for decision in decisions] == ["mtp", "suffix"]
    reasons = {verdict.name: verdict.reason for verdict in decisions[1].candidates}
    assert reasons["mtp"] == "the checkpoint has no weights of mtp.fc"
