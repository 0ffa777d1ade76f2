"""Families that hear and that transformers has no class for, against its parts and the published
equations.
"""

from __future__ import annotations

import copy
import json
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from safetensors.torch import save_file
from samples import parametrize_sample
from tests.plugins.models.test_assembled import (
    MINICPM,
    execute,
    minicpm_shapes,
    random_weights,
    text_model,
    write_tokenizer,
)
from tests.plugins.models.test_published import CPU, driver
from transformers.models.fun_asr_nano import modeling_fun_asr_nano as fun_asr
from transformers.models.gemma3n import modeling_gemma3n as gemma3n
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni
from transformers.models.whisper import modeling_whisper as whisper

import modulm
from modulm.errors import CheckpointError, RequestError, UnsupportedError
from modulm.nn import read_config
from modulm.plugins import manager
from modulm.testing.checkpoints import _randomise
from modulm_media import Media, Sound
from modulm_media.reader import load_processor
from modulm_media.spectra import decibel_mels, kaldi_mels
from modulm_towers.testing import images, processor_of, sounds

#: Architectures that this file tests.
ASSEMBLED = {
    "FireRedASR2ForConditionalGeneration",
    "FunASRForConditionalGeneration",
    "FunAudioChatForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "MiniCPMO",
    "MiDashengLMModel",
    "MoonshotKimiaForCausalLM",
    "MossAudioModel",
    "Qwen3ASRForcedAlignerForTokenClassification",
    "UltravoxModel",
}
HEARD = sounds((0.32, 1.2))


def randomised(module):
    """The module with weights of about unit gain, and its weights under their names."""
    torch.manual_seed(2)
    with torch.no_grad():
        _randomise(module)
    module = module.float().eval()
    return module, {name: tensor.clone() for name, tensor in module.state_dict().items()}


def prefixed(weights, prefix):
    return {prefix + name: tensor for name, tensor in weights.items()}


def stored(folder, *parts):
    weights = {name: tensor for part in parts for name, tensor in part.items()}
    weights = {name: tensor.clone().contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors")
    load_processor.cache_clear()


def written(folder, name, tokens, **files):
    """Write a tiny checkpoint without weights; returns its config.json."""
    table = dict(driver(name).tiny())
    write_tokenizer(folder, table, tokens)
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    return table


def item(folder, name, sound):
    """What the media family makes of a sound: tensors, and how many tokens."""
    table = json.loads((folder / "config.json").read_text())
    family = manager.current().load("media_families", name)
    made = family(processor_of(name, folder), table).process(
        Media("audio", Sound(sound, 16000)), {}
    )
    return {key: torch.from_numpy(np.array(t)) for key, t in made.tensors.items()}, made.tokens


def check(
    folder, text, model, embeddings, token, deep=(), more=lambda ids: {}, heard=HEARD,
    kind="audio", **options,
):  # fmt: skip
    """Compare log probabilities with those of the text model, whose placeholders have the given
    embeddings. deep: what its first layers add at the placeholders. more: further inputs. options:
    those of `execute`.
    """
    with modulm.LLM(str(folder), max_logprobs=-1, **CPU) as llm:
        prompt = {"prompt": text, "multi_modal_data": {kind: heard}}
        params = modulm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1)
        (answer,) = llm.generate([prompt], params, use_tqdm=False)
    rows = [[entry[i].logprob for i in range(512)] for entry in answer.prompt_logprobs[1:]]
    ids = torch.tensor(answer.prompt_token_ids)
    inside = torch.isin(ids, torch.tensor(token))
    assert int(inside.sum()) == sum(len(part) for part in embeddings)

    def add(level):
        def hook(module, inputs, output):
            hidden = output[0] if isinstance(output, tuple) else output
            hidden[0, inside] += torch.cat(level)

        return hook

    for layer, level in zip(model.model.layers, deep, strict=False):
        layer.register_forward_hook(add(level))
    with torch.inference_mode():
        inputs = model.get_input_embeddings()(ids[None]).clone()
        inputs[0, inside] = torch.cat(embeddings)
        expected = model(inputs_embeds=inputs, **more(ids[None])).logits[0].log_softmax(-1)
    assert (torch.tensor(rows) - expected[:-1]).abs().max() < 1e-3
    execute(folder, text, heard, kind, **options)


def table_id(folder, token):
    """The id of a token of a checkpoint."""
    return hf.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(token)


def whisper_config(table):
    names = ("num_mel_bins", "d_model", "encoder_layers", "encoder_attention_heads",
             "encoder_ffn_dim", "max_source_positions")  # fmt: skip
    config = hf.WhisperConfig(**{name: table[name] for name in names})
    config._attn_implementation = "eager"
    return config


def through(layers, x):
    """Whisper's blocks for one sound, x: [frames, width]."""
    for layer in layers:
        x = layer(x[None], None)
        x = x[0] if isinstance(x, tuple) else x
        x = x[0] if x.dim() == 3 else x
    return x


ULTRAVOX = {
    "0.5": {}, "0.4": {"projector_ln_mid": False}, "gelu": {"projector_act": "gelu"},
    "blocks": {"num_projector_layers": 2},
}  # fmt: skip


@parametrize_sample("version", ULTRAVOX, every=3)
def test_ultravox_stacks_frames_of_whisper(version, tmp_path):
    mel = {"feature_size": 16, "chunk_length": 1}
    table = written(tmp_path, "UltravoxModel", ["<|audio|>"], preprocessor_config=mel)
    table = {**table, **ULTRAVOX[version]}
    (tmp_path / "config.json").write_text(json.dumps(table))
    model = text_model("Llama", table["text_config"])
    config = whisper_config(table["audio_config"])
    encoder, w = randomised(whisper.WhisperEncoder(config))
    shapes = {"ln_pre.weight": (256,)}
    if version == "blocks":
        blocks, more = randomised(
            torch.nn.ModuleList(whisper.WhisperEncoderLayer(config) for _ in range(2))
        )
        shapes |= {
            "linear_in.weight": (32, 256), "linear_in.bias": (32,), "ln_post.weight": (32,),
            "embed_positions.weight": (50, 32), "linear_out.weight": (64, 32),
            "linear_out.bias": (64,),
        }  # fmt: skip
    else:
        inner = 48 if version == "gelu" else 24
        norm = "ln_post.weight" if version == "0.4" else "ln_mid.weight"
        shapes |= {
            "linear_1.weight": (48, 256), "linear_2.weight": (64, inner),
            norm: (64 if version == "0.4" else inner,),
        }  # fmt: skip
        more = {}
    p = random_weights(shapes)
    stored(
        tmp_path, prefixed(w, "model.encoder."), prefixed(model.state_dict(), "language_model."),
        prefixed(p, "multi_modal_projector."), prefixed(more, "multi_modal_projector.layers."),
    )  # fmt: skip

    def norm(name, x):
        return F.rms_norm(x, x.shape[-1:], p[f"{name}.weight"], 1e-6)

    embeddings = []
    for sound in HEARD:
        tensors, _ = item(tmp_path, "UltravoxModel", sound)
        tokens = []
        windows = zip(tensors["input_features"], tensors["frames"].tolist(), strict=True)
        with torch.inference_mode():
            for window, frames in windows:
                x = F.gelu(encoder.conv2(F.gelu(encoder.conv1(window[None]))))[0].T
                x = x[: (frames + 1) // 2]
                x = encoder.layer_norm(
                    through(encoder.layers, x + w["embed_positions.weight"][: len(x)])
                )
                x = F.pad(x, (0, 0, 0, -len(x) % 8)).reshape(-1, 256)
                x = norm("ln_pre", x)
                if version == "blocks":
                    x = F.linear(x, p["linear_in.weight"], p["linear_in.bias"])
                    x = through(blocks, x + p["embed_positions.weight"][: len(x)])
                    x = norm("ln_post", x)
                    x = F.linear(x, p["linear_out.weight"], p["linear_out.bias"])
                else:
                    x = x @ p["linear_1.weight"].T
                    one, two = x.chunk(2, dim=-1)
                    x = F.gelu(x) if version == "gelu" else one * F.silu(two)
                    x = x if version == "0.4" else norm("ln_mid", x)
                    x = x @ p["linear_2.weight"].T
                    x = norm("ln_post", x) if version == "0.4" else x
                tokens.append(x)
        embeddings.append(torch.cat(tokens))
    check(tmp_path, "The <|audio|> of <|audio|> is", model, embeddings, 480)


@pytest.mark.exhaustive
def test_kimi_audio_adds_frames_of_whisper_to_the_empty_text(tmp_path):
    """Its encoder's files are in a folder of their own."""
    name, blank = "MoonshotKimiaForCausalLM", "<|im_kimia_text_blank|>"
    table = written(tmp_path, name, ["<|im_media_begin|>", blank, "<|im_media_end|>"])
    inner = tmp_path / "whisper-large-v3"
    inner.mkdir()
    mel = {"feature_size": 16, "chunk_length": 2}
    (inner / "preprocessor_config.json").write_text(json.dumps(mel))
    (inner / "config.json").write_text(json.dumps(table.pop("audio_config")))
    (tmp_path / "config.json").write_text(json.dumps(table))
    keys = ("architectures", "model_type", "kimia_adaptor_input_dim")
    model = text_model("Qwen2", {key: v for key, v in table.items() if key not in keys})
    config = whisper_config(json.loads((inner / "config.json").read_text()))
    encoder, w = randomised(whisper.WhisperEncoder(config))
    stored(inner, prefixed(w, "model.encoder."), {"model.decoder.layer_norm.bias": torch.ones(2)})
    p = random_weights({
        "layers.0.weight": (64, 128), "layers.0.bias": (64,), "layers.3.weight": (64, 64),
        "layers.3.bias": (64,), "layers.4.weight": (64,), "layers.4.bias": (64,),
    })  # fmt: skip
    stored(
        tmp_path, model.state_dict(), prefixed(p, "model.vq_adaptor."),
        {"model.mimo_norm.weight": torch.ones(64), "mimo_output.weight": torch.ones(2, 64)},
    )  # fmt: skip
    embeddings, heard = [], sounds((0.32, 2.3))
    for sound in heard:
        tensors, _ = item(tmp_path, name, sound)
        with torch.inference_mode():
            states = encoder(tensors["input_features"]).last_hidden_state
        counts = [-(-min(32000, len(sound) - at) // 1280) for at in range(0, len(sound), 32000)]
        x = torch.cat([row[: 4 * n] for row, n in zip(states, counts, strict=True)])
        x = F.silu(F.linear(x.reshape(-1, 128), p["layers.0.weight"], p["layers.0.bias"]))
        x = F.linear(x, p["layers.3.weight"], p["layers.3.bias"])
        eps = model.config.rms_norm_eps
        x = F.layer_norm(x, (64,), p["layers.4.weight"], p["layers.4.bias"], eps)
        empty = model.get_input_embeddings().weight[481].detach()
        embeddings.append((x + empty) * 2**0.5)
    check(tmp_path, f"The {blank} of {blank} is", model, embeddings, 481, heard=heard)


@parametrize_sample("mode", ["add", "replace"], every=2)
def test_fun_audio_chat_reads_groups_of_frames(mode, tmp_path):
    name = "FunAudioChatForConditionalGeneration"
    mel = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16}
    table = written(tmp_path, name, ["<|AUDIO|>"], preprocessor_config=mel)
    table["audio_config"] = {**table["audio_config"], "continuous_features_mode": mode}
    (tmp_path / "config.json").write_text(json.dumps(table))
    model = text_model("Qwen3", table["text_config"])
    keys = set(omni.Qwen2_5OmniAudioEncoderConfig().to_dict()) - {"model_type"}
    audio = {key: value for key, value in table["audio_config"].items() if key in keys}
    config = omni.Qwen2_5OmniAudioEncoderConfig(**audio, attn_implementation="eager")
    encoder, w = randomised(omni.Qwen2_5OmniAudioEncoder(config))
    p = random_weights({
        "embed_tokens.weight": (12, 64), "output_matching.weight": (64, 64),
        "continual_output_matching.weight": (64, 64),
    })  # fmt: skip
    stored(
        tmp_path, prefixed(w, "continuous_audio_tower."), prefixed(p, "audio_tower."),
        prefixed(model.state_dict(), "language_model."),
        {"audio_invert_tower.norm.weight": torch.ones(2)},
    )  # fmt: skip
    embeddings = []
    for sound in HEARD:
        tensors, _ = item(tmp_path, name, sound)
        frames = int(tensors["feature_attention_mask"].sum())
        with torch.inference_mode():
            lengths = torch.tensor([frames])
            x = encoder(
                tensors["input_features"][0, :, :frames], feature_lens=lengths,
                aftercnn_lens=(lengths - 1) // 2 + 1,
            ).last_hidden_state  # fmt: skip
        count = -(-(len(sound) * 25 // 16000) // 5)
        x = F.pad(x, (0, 0, 0, 5 * count))[: 5 * count].view(count, 5, 64).mean(1)
        x = x @ p["continual_output_matching.weight"].T
        code = p["output_matching.weight"] @ p["embed_tokens.weight"][11]
        embeddings.append(x + code if mode == "add" else x)
    check(tmp_path, "The <|AUDIO|> of <|AUDIO|> is", model, embeddings, 480)


#: transformers' names of parts of Fun-ASR Nano's layers, and FunASR's.
FUN_ASR = (
    (".self_attn.q_proj.", ".self_attn.linear_q."), (".self_attn.k_proj.", ".self_attn.linear_k."),
    (".self_attn.v_proj.", ".self_attn.linear_v."), (".o_proj.", ".linear_out."),
    (".fsmn.conv.", ".fsmn_block."), (".mlp.fc", ".feed_forward.w_"),
    ("input_layernorm", "norm1"), ("post_attention_layernorm", "norm2"),
)  # fmt: skip


@pytest.mark.exhaustive
def test_funasr_reads_the_first_eighth(tmp_path):
    name, token = "FunASRForConditionalGeneration", "<|AUDIO|>"
    frames = {"frontend_conf": {"n_mels": 8, "lfr_m": 7, "lfr_n": 6, "window": "hamming"}}
    table = written(tmp_path, name, [token], preprocessor_config=frames)
    ours = ("architectures", "audio_encoder_conf", "audio_adaptor_conf")
    model = text_model("Qwen3", {key: value for key, value in table.items() if key not in ours})
    theirs = copy.deepcopy(dict(driver("FunAsrNanoForConditionalGeneration").tiny()))
    for part in ("audio_config", "adaptor_config"):
        theirs[part]["layer_norm_eps"] = 1e-12
    config = hf.FunAsrNanoConfig(**theirs)
    for part in (config, config.audio_config, config.adaptor_config):
        part._attn_implementation = "eager"
    encoder, w = randomised(fun_asr.FunAsrNanoEncoder(config.audio_config))
    projector, p = randomised(fun_asr.FunAsrNanoMultiModalProjector(config))
    places = {
        "layers.0.": "encoders0.0.", "layers.1.": "encoders.0.",
        "layers.2.final_layernorm.": "after_norm.", "layers.2.": "encoders.1.",
        "layers.3.final_layernorm.": "tp_norm.", "layers.3.": "tp_encoders.0.",
    }  # fmt: skip
    weights = {}
    for old, tensor in {**w, **prefixed(p, "projector.")}.items():
        new = old
        for one, other in FUN_ASR:
            new = new.replace(one, other)
        if new.startswith("projector."):
            new = new.replace("projector.layers.", "audio_adaptor.blocks.")
            new = new.replace("projector.linear_", "audio_adaptor.linear")
        else:
            stem = next(stem for stem in places if new.startswith(stem))
            new = f"audio_encoder.{new.replace(stem, places[stem], 1)}"
        weights[new] = tensor
    for stem in {name.rpartition("linear_q.")[0] for name in weights if "encoder" in name} - {""}:
        for kind in ("weight", "bias"):
            parts = [weights.pop(f"{stem}linear_{x}.{kind}") for x in "qkv"]
            weights[f"{stem}linear_q_k_v.{kind}"] = torch.cat(parts)
    stored(tmp_path, weights, prefixed(model.state_dict(), "llm."))
    embeddings = []
    for sound in HEARD:
        tensors, tokens = item(tmp_path, name, sound)
        mask = torch.ones(1, len(tensors["input_features"]), dtype=torch.long)
        with torch.inference_mode():
            x = encoder(tensors["input_features"][None], mask).last_hidden_state
            x = projector(x, mask)[0]
        assert -(-len(x) // 8) == len(tokens)
        embeddings.append(x[: len(tokens)])
    check(tmp_path, f"The {token} of {token} is", model, embeddings, 480)


def linear(w, name, x):
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def layer_norm(w, name, x, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def fire_red_block(w, at, x):
    """A block of FireRedASR's conformer for one sound, x: [frames, 32]."""

    def feed(name, x):
        inner = F.silu(linear(w, f"{at}{name}.net.1", layer_norm(w, f"{at}{name}.net.0", x)))
        return linear(w, f"{at}{name}.net.4", inner)

    x = x + 0.5 * feed("ffn1", x)
    q, k, v = (
        linear(w, f"{at}mhsa.w_{kind}s", layer_norm(w, f"{at}mhsa.layer_norm_{kind}", x))
        .unflatten(-1, (2, 16)).transpose(0, 1)
        for kind in "qkv"
    )  # fmt: skip
    steps = torch.arange(len(x))
    angles = (steps[:, None] - steps)[..., None] / 10000 ** (torch.arange(0, 32, 2) / 32)
    sines = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(2)
    far = linear(w, f"{at}mhsa.linear_pos", sines).unflatten(-1, (2, 16))
    near, distant = (w[f"{at}mhsa.pos_bias_{kind}"][:, None] for kind in "uv")
    scores = (q + near) @ k.transpose(1, 2) + torch.einsum("hid,ijhd->hij", q + distant, far)
    seen = (scores / 4).softmax(-1) @ v
    x = x + linear(w, f"{at}mhsa.fc", seen.transpose(0, 1).flatten(1))
    wide = F.conv1d(layer_norm(w, f"{at}conv.pre_layer_norm", x).T[None],
                    w[f"{at}conv.pointwise_conv1.weight"])  # fmt: skip
    wide = F.conv1d(F.glu(wide, dim=1), w[f"{at}conv.depthwise_conv.weight"], padding=2, groups=64)
    wide = F.silu(layer_norm(w, f"{at}conv.batch_norm", wide[0].T))
    x = x + F.conv1d(wide.T[None], w[f"{at}conv.pointwise_conv2.weight"])[0].T
    return layer_norm(w, f"{at}layer_norm", x + 0.5 * feed("ffn2", x))


def fire_red_shapes():
    """Names and shapes of the conformer."""
    stem = "input_preprocessor."
    shapes = {
        f"{stem}conv.0.weight": (32, 1, 3, 3), f"{stem}conv.0.bias": (32,),
        f"{stem}conv.2.weight": (32, 32, 3, 3), f"{stem}conv.2.bias": (32,),
        f"{stem}out.weight": (32, 96), f"{stem}out.bias": (32,),
    }  # fmt: skip
    for i in (0, 1):
        at = f"layer_stack.{i}."
        norms = ["layer_norm", "conv.pre_layer_norm", "ffn1.net.0", "ffn2.net.0"]
        norms += [f"mhsa.layer_norm_{kind}" for kind in "qkv"]
        for each in norms:
            shapes |= {f"{at}{each}.weight": (32,), f"{at}{each}.bias": (32,)}
        for each in ("w_qs", "w_ks", "w_vs", "linear_pos", "fc"):
            shapes[f"{at}mhsa.{each}.weight"] = (32, 32)
        for each in ("ffn1", "ffn2"):
            shapes |= {
                f"{at}{each}.net.1.weight": (128, 32), f"{at}{each}.net.1.bias": (128,),
                f"{at}{each}.net.4.weight": (32, 128), f"{at}{each}.net.4.bias": (32,),
            }  # fmt: skip
        shapes |= {
            f"{at}mhsa.pos_bias_u": (2, 16), f"{at}mhsa.pos_bias_v": (2, 16),
            f"{at}conv.pointwise_conv1.weight": (128, 32, 1),
            f"{at}conv.depthwise_conv.weight": (64, 1, 5),
            f"{at}conv.batch_norm.weight": (64,), f"{at}conv.batch_norm.bias": (64,),
            f"{at}conv.pointwise_conv2.weight": (32, 64, 1),
        }  # fmt: skip
    return shapes


def fire_red_states(w, frames):
    """The conformer's output for one sound, frames: [frames, 16]."""
    x = F.pad(frames, (0, 0, 0, 6))[None, None]
    for layer in (0, 2):
        at = f"input_preprocessor.conv.{layer}"
        x = F.relu(F.conv2d(x, w[f"{at}.weight"], w[f"{at}.bias"], stride=2))
    x = linear(w, "input_preprocessor.out", x[0].transpose(0, 1).flatten(1))
    for i in (0, 1):
        x = fire_red_block(w, f"layer_stack.{i}.", x)
    return x


def fire_red_mel():
    rng = np.random.default_rng(0)
    numbers = (rng.normal(9, 2, 16).tolist(), rng.uniform(0.1, 0.4, 16).tolist())
    return {"num_mel_bins": 16, "means": numbers[0], "inverse_std_variences": numbers[1]}


def test_fire_red_has_a_conformer(tmp_path):
    name, token = "FireRedASR2ForConditionalGeneration", "<|AUDIO|>"
    table = written(tmp_path, name, [token], preprocessor_config=fire_red_mel())
    ours = ("architectures", "audio_encoder_conf", "encoder_downsample_rate")
    model = text_model("Qwen2", {key: value for key, value in table.items() if key not in ours})
    w = random_weights(fire_red_shapes())
    p = random_weights({
        "linear1.weight": (64, 64), "linear1.bias": (64,), "linear2.weight": (64, 64),
        "linear2.bias": (64,),
    })  # fmt: skip
    stored(
        tmp_path, prefixed(w, "encoder."), prefixed(p, "encoder_projector."),
        prefixed(model.state_dict(), "llm."),
        {"encoder.positional_encoding.pe": torch.ones(1, 9, 32)},
    )  # fmt: skip
    embeddings = []
    for sound in HEARD:
        tensors, _ = item(tmp_path, name, sound)
        x = fire_red_states(w, tensors["input_features"])
        x = x[: len(x) // 2 * 2].reshape(-1, 64)
        embeddings.append(linear(p, "linear2", F.relu(linear(p, "linear1", x))))
    check(tmp_path, f"The {token} of {token} is", model, embeddings, 480)


def lid_logits(w, encoded, tokens):
    """[tokens, 512] of FireRedLID's decoder; encoded: [frames, 32]."""

    def attend(at, x, y, seen):
        q, k, v = (
            linear(w, f"{at}.w_{kind}s", each).unflatten(-1, (2, 16)).transpose(0, 1)
            for kind, each in (("q", x), ("k", y), ("v", y))
        )
        scores = (q @ k.transpose(1, 2) / 4).masked_fill(~seen, -torch.inf)
        return linear(w, f"{at}.fc", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))

    angles = torch.arange(len(tokens))[:, None] / 10000 ** (torch.arange(0, 32, 2) / 32)
    x = w["tgt_word_emb.weight"][tokens] * 32**0.5
    x = x + torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
    before = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    every = torch.ones(len(x), len(encoded), dtype=torch.bool)
    for i in (0, 1):
        at = f"layer_stack.{i}."
        normed = layer_norm(w, f"{at}self_attn_norm", x)
        x = x + attend(f"{at}self_attn", normed, normed, before)
        normed = layer_norm(w, f"{at}cross_attn_norm", x)
        x = x + attend(f"{at}cross_attn", normed, encoded, every)
        inner = F.gelu(linear(w, f"{at}mlp.w_1", layer_norm(w, f"{at}mlp_norm", x)))
        x = x + linear(w, f"{at}mlp.w_2", inner)
    return layer_norm(w, "layer_norm_out", x) @ w["tgt_word_emb.weight"].T


def test_fire_red_names_languages(tmp_path):
    """Answers to a batch of sounds, and to prompts in pieces."""
    name = "FireRedLIDForConditionalGeneration"
    written(tmp_path, name, [], preprocessor_config=fire_red_mel())
    w = random_weights(fire_red_shapes())
    shapes = {"tgt_word_emb.weight": (512, 32)}
    places = ["layer_norm_out"]
    for i in (0, 1):
        at = f"layer_stack.{i}."
        places += [f"{at}{kind}_norm" for kind in ("self_attn", "cross_attn", "mlp")]
        for kind in ("self_attn", "cross_attn"):
            for part in ("w_qs", "w_ks", "w_vs", "fc"):
                shapes[f"{at}{kind}.{part}.weight"] = (32, 32)
                if part != "w_ks":
                    shapes[f"{at}{kind}.{part}.bias"] = (32,)
        shapes |= {
            f"{at}mlp.w_1.weight": (128, 32), f"{at}mlp.w_1.bias": (128,),
            f"{at}mlp.w_2.weight": (32, 128), f"{at}mlp.w_2.bias": (32,),
        }  # fmt: skip
    for at in places:
        shapes |= {f"{at}.weight": (32,), f"{at}.bias": (32,)}
    p = random_weights(shapes)
    stored(
        tmp_path, prefixed(w, "encoder."), prefixed(p, "lid_decoder."),
        {"lid_decoder.tgt_word_prj.weight": p["tgt_word_emb.weight"].clone(),
         "lid_decoder.positional_encoding.pe": torch.ones(1, 9, 32)},
    )  # fmt: skip
    prompts = [
        {"prompt_token_ids": [1, 5, 6], "multi_modal_data": {"audio": sound}} for sound in HEARD
    ]
    params = modulm.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=-1)
    expected = []
    for flags in ({}, {"long_prefill_token_threshold": 2}):
        with modulm.LLM(str(tmp_path), max_logprobs=-1, **CPU, **flags) as llm:
            answers = llm.generate(prompts, params, use_tqdm=False)
        for index, answer in enumerate(answers):
            (choice,) = answer.outputs
            if len(expected) == index:
                tensors, _ = item(tmp_path, name, HEARD[index])
                encoded = fire_red_states(w, tensors["input_features"])
                tokens = torch.tensor([1, 5, 6, *choice.token_ids[:-1]])
                expected.append(lid_logits(p, encoded, tokens)[2:].log_softmax(-1))
            rows = [[entry[i].logprob for i in range(512)] for entry in choice.logprobs]
            assert (torch.tensor(rows) - expected[index]).abs().max() < 1e-3


@pytest.mark.exhaustive
def test_midashenglm_attends_within_parts(tmp_path):
    name, token = "MiDashengLMModel", "<|AUDIO|>"
    table = written(tmp_path, name, [token])
    model = text_model("Qwen2", table["text_config"])
    shapes = {
        "init_bn.weight": (16,), "init_bn.bias": (16,), "init_bn.running_mean": (16,),
        "patch_embed.proj.weight": (32, 1, 16, 4), "patch_embed.proj.bias": (32,),
        "time_pos_embed": (1, 32, 1, 12), "freq_pos_embed": (1, 32, 1, 1),
        "norm.weight": (32,), "norm.bias": (32,),
    }  # fmt: skip
    for i in (0, 1):
        at = f"blocks.{i}."
        for each in ("norm1", "norm2"):
            shapes |= {f"{at}{each}.weight": (32,), f"{at}{each}.bias": (32,)}
        shapes |= {
            f"{at}attn.qkv.weight": (96, 32), f"{at}attn.qkv.bias": (96,),
            f"{at}attn.proj.weight": (32, 32), f"{at}attn.proj.bias": (32,),
            f"{at}mlp.fc1.weight": (64, 32), f"{at}mlp.fc1.bias": (64,),
            f"{at}mlp.fc2.weight": (32, 64), f"{at}mlp.fc2.bias": (32,),
            f"{at}ls1.gamma": (32,), f"{at}ls2.gamma": (32,),
        }  # fmt: skip
    w = random_weights(shapes)
    w["init_bn.running_var"] = torch.rand(16) * 900 + 100
    p = random_weights({
        "net.0.weight": (64, 160), "net.0.bias": (64,), "net.2.weight": (64, 64),
        "net.2.bias": (64,),
    })  # fmt: skip
    stored(
        tmp_path, prefixed(w, "audio_encoder."), prefixed(p, "audio_projector."),
        prefixed(model.state_dict(), "decoder."),
        {"audio_encoder.init_bn.num_batches_tracked": torch.tensor(1),
         "audio_encoder.front_end.0.mel_scale.fb": torch.ones(2)},
    )  # fmt: skip
    embeddings, masked = [], 0
    for sound in HEARD:
        tensors, _ = item(tmp_path, name, sound)
        mel = tensors["input_features"]
        bn = (w["init_bn.weight"], w["init_bn.bias"])
        x = F.batch_norm(mel.T, w["init_bn.running_mean"], w["init_bn.running_var"], *bn).T
        x = F.conv2d(x[None, None], w["patch_embed.proj.weight"], w["patch_embed.proj.bias"],
                     stride=(16, 4))  # fmt: skip
        seen = torch.arange(x.shape[-1]) < len(sound) // 640
        outputs = []
        for part, heard in zip(x.split(12, dim=-1), seen.split(12), strict=True):
            masked += int(not heard.all())
            rows = part + w["time_pos_embed"][..., : part.shape[-1]] + w["freq_pos_embed"]
            rows = rows[0].flatten(1).T
            for i in (0, 1):
                at = f"blocks.{i}."
                qkv = linear(w, f"{at}attn.qkv", layer_norm(w, f"{at}norm1", rows, 1e-6))
                q, k, v = qkv.view(-1, 3, 2, 16).permute(1, 2, 0, 3)
                scores = (q @ k.transpose(1, 2) / 4).masked_fill(~heard, -torch.inf)
                out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
                rows = rows + linear(w, f"{at}attn.proj", out) * w[f"{at}ls1.gamma"]
                inner = F.gelu(linear(w, f"{at}mlp.fc1", layer_norm(w, f"{at}norm2", rows, 1e-6)))
                rows = rows + linear(w, f"{at}mlp.fc2", inner) * w[f"{at}ls2.gamma"]
            outputs.append(layer_norm(w, "norm", rows, 1e-6))
        x = torch.cat(outputs)
        x = x[: len(x) // 5 * 5].reshape(-1, 160)
        embeddings.append(linear(p, "net.2", F.gelu(linear(p, "net.0", x))))
    check(tmp_path, f"The {token} of {token} is", model, embeddings, 480)


@parametrize_sample("times", [False, True], every=2)
def test_moss_audio_adds_inner_layers(times, tmp_path):
    name, mark = "MossAudioModel", "<|audio_bos|><|AUDIO|><|audio_eos|>"
    settings = {
        "audio_start_id": 482, "audio_token_id": 480, "audio_end_id": 483,
        "enable_time_marker": times,
        "mel_config": {"mel_dim": 16},
    }  # fmt: skip
    # Published tokenizers lack the placeholder's tokens.
    table = written(tmp_path, name, ["<|one|>", "<|two|>", "<|three|>", "<|four|>"],
                    processor_config=settings)  # fmt: skip
    model = text_model("Qwen3", table["language_config"])
    config = whisper_config(table["audio_config"])
    layers, more = randomised(
        torch.nn.ModuleList(whisper.WhisperEncoderLayer(config) for _ in range(2))
    )
    w = random_weights({
        "conv1.weight": (8, 1, 3, 3), "conv1.bias": (8,), "conv2.weight": (8, 8, 3, 3),
        "conv2.bias": (8,), "conv3.weight": (8, 8, 3, 3), "conv3.bias": (8,),
        "stem_proj.weight": (32, 16), "stem_proj.bias": (32,), "layer_norm.weight": (32,),
        "layer_norm.bias": (32,), "out_proj.weight": (24, 32),
    })  # fmt: skip
    adapters = ["audio_adapter", *(f"deepstack_audio_merger_list.{i}" for i in (0, 1))]
    shapes = {
        f"{at}.{part}": shape
        for at in adapters
        for part, shape in (
            ("gate_proj.weight", (40, 24)), ("up_proj.weight", (40, 24)),
            ("down_proj.weight", (64, 40)),
        )
    }  # fmt: skip
    p = random_weights(shapes)
    text = {name.replace("model.", "language_model.", 1): t
            for name, t in model.state_dict().items()}  # fmt: skip
    stored(
        tmp_path, prefixed(w, "audio_encoder."), prefixed(more, "audio_encoder.layers."), p, text
    )
    levels: list[list[torch.Tensor]] = [[], [], []]
    for sound in HEARD:
        tensors, tokens = item(tmp_path, name, sound)
        mel = tensors["input_features"]
        parts = [mel[:, at : at + 32] for at in range(0, mel.shape[1], 32)]
        states: list[list[torch.Tensor]] = [[], [], []]
        for part in parts:
            # The last of several is filled up with zeros.
            filled = F.pad(part, (0, 32 - part.shape[1])) if len(parts) > 1 else part
            x = filled[None, None]
            for i in (1, 2, 3):
                x = F.gelu(F.conv2d(x, w[f"conv{i}.weight"], w[f"conv{i}.bias"], 2, 1))
            x = linear(w, "stem_proj", x[0].permute(2, 0, 1).flatten(1))
            x = x[: -(-part.shape[1] // 8)]
            waves = 10000 ** (-torch.arange(16) / 15)
            angles = torch.arange(len(x))[:, None] * waves
            x = x + torch.cat([angles.sin(), angles.cos()], dim=1)
            with torch.inference_mode():
                for i, layer in enumerate(layers):
                    x = through([layer], x)
                    states[i + 1].append(x)
            states[0].append(layer_norm(w, "layer_norm", x))
        for level, at, some in zip(levels, adapters, states, strict=True):
            x = torch.cat(some) @ w["out_proj.weight"].T
            gate, up = (x @ p[f"{at}.{kind}_proj.weight"].T for kind in ("gate", "up"))
            level.append((F.silu(gate) * up) @ p[f"{at}.down_proj.weight"].T)
        assert (tokens == 480).sum() == len(levels[0][-1])
    check(tmp_path, f"The {mark} of {mark} is", model, levels[0], 480, levels[1:])


def test_moss_audio_writes_the_time_every_two_seconds(tmp_path):
    name = "MossAudioModel"
    settings = {"audio_token_id": 480, "enable_time_marker": True, "mel_config": {"mel_dim": 16}}
    written(tmp_path, name, ["<|one|>"], processor_config=settings)
    load_processor.cache_clear()
    (sound,) = sounds((4.5,))
    _, tokens = item(tmp_path, name, sound)
    digits = processor_of(name, tmp_path).tokenizer.convert_tokens_to_ids(["2", "4"])
    marks = [480] * 25
    assert tokens.tolist() == [*marks, digits[0], *marks, digits[1], *[480] * 7]


#: The blocks of MobileNet 5 with a 16th of its channels, by stage: expansion and depthwise kernels
#: before it and inside, or heads, their size and the stride of keys.
MOBILENET = (
    (8, ["edge"] * 3),
    (16, [(6, 3, 5), *((4, kernel, 0) for kernel in (5, 3, 5, 3))]),
    (40, [(6, 5, 5), *[(4, 5, 0)] * 7, (1, 0, 0), *[[12, 64, 2], (2, 0, 0)] * 14]),
    (80, [(6, 5, 5), *[[16, 96, 1], (2, 0, 0)] * 19]),
)


def mobilenet_shapes(outputs):
    """Names as in timm."""
    shapes = {
        "conv_stem.conv.weight": (64, 3, 3, 3), "conv_stem.conv.bias": (64,),
        "conv_stem.bn.weight": (64,),
    }  # fmt: skip

    def add(at, count, inputs, kernel=1, norm="bn"):
        conv, norm = (f"{at}.conv", f"{at}.{norm}") if norm == "bn" else (at, norm)
        shapes[f"{conv}.weight"] = (count, inputs, kernel, kernel)
        if norm:
            shapes[f"{norm}.weight"] = (count,)

    def invert(at, inputs, outputs, expansion, before, inside):
        wide = inputs * expansion
        if before:
            add(f"{at}.dw_start", inputs, 1, before)
        add(f"{at}.pw_exp", wide, inputs)
        if inside:
            add(f"{at}.dw_mid", wide, 1, inside)
        add(f"{at}.pw_proj", outputs, wide)

    inputs = 64
    for stage, (channels, blocks) in enumerate(MOBILENET):
        for number, block in enumerate(blocks):
            at = f"blocks.{stage}.{number}"
            if block == "edge":
                add(f"{at}.conv_exp", 4 * inputs, inputs, 3, f"{at}.bn1")
                add(f"{at}.conv_pwl", channels, 4 * inputs, 1, f"{at}.bn2")
            elif isinstance(block, list):
                heads, width, stride = block
                shapes[f"{at}.norm.weight"] = shapes[f"{at}.layer_scale.gamma"] = (channels,)
                add(f"{at}.attn.query.proj", heads * width, channels, 1, "")
                add(f"{at}.attn.output.proj", channels, heads * width, 1, "")
                for part in ("key", "value"):
                    if stride > 1:
                        name = f"{at}.attn.{part}"
                        add(f"{name}.down_conv", channels, 1, 3, f"{name}.norm")
                    add(f"{at}.attn.{part}.proj", width, channels, 1, "")
            else:
                invert(at, inputs, channels, *block)
                shapes[f"{at}.layer_scale.gamma"] = (channels,)
            inputs = channels
    invert("msfa.ffn", 120, outputs, 2, 0, 0)
    return {**shapes, "msfa.norm.weight": (outputs,)}


def mobilenet(w, x, side):
    """[n, 3, height, width] -> [n, tokens, outputs]; w has timm's names."""

    def norm(name, x):
        return F.rms_norm(x.movedim(1, 3), (x.shape[1],), w[f"{name}.weight"], 1e-6).movedim(3, 1)

    def conv(name, x, stride=1):
        weight = w[f"{name}.weight"]
        # As TensorFlow's "same": for even sizes and a stride of 2 one more at the end.
        missing = weight.shape[-1] - stride
        pads = (missing // 2, missing - missing // 2) * 2 if missing > 0 else (0,) * 4
        groups = x.shape[1] // weight.shape[1]
        return F.conv2d(F.pad(x, pads), weight, w.get(f"{name}.bias"), stride, groups=groups)

    def normed(name, x, stride=1):
        return norm(f"{name}.bn", conv(f"{name}.conv", x, stride))

    def act(x):
        return F.gelu(x, approximate="tanh")

    def invert(at, x, stride=1):
        inside = f"{at}.dw_mid.conv.weight" in w
        if f"{at}.dw_start.conv.weight" in w:
            x = normed(f"{at}.dw_start", x, 1 if inside else stride)
        x = act(normed(f"{at}.pw_exp", x))
        x = act(normed(f"{at}.dw_mid", x, stride)) if inside else x
        return normed(f"{at}.pw_proj", x)

    x, ends = act(normed("conv_stem", x, 2)), []
    for stage, (_, blocks) in enumerate(MOBILENET):
        for number, block in enumerate(blocks):
            at, stride = f"blocks.{stage}.{number}", 2 if number == 0 else 1
            if block == "edge":
                inner = act(norm(f"{at}.bn1", conv(f"{at}.conv_exp", x, stride)))
                new = norm(f"{at}.bn2", conv(f"{at}.conv_pwl", inner))
            elif isinstance(block, list):
                heads, width, less = block
                inner = norm(f"{at}.norm", x)
                sides = []
                for part in ("key", "value"):
                    name = f"{at}.attn.{part}"
                    few = inner
                    if less > 1:
                        few = norm(f"{name}.norm", conv(f"{name}.down_conv", inner, less))
                    sides.append(conv(f"{name}.proj", few).flatten(2))
                query = conv(f"{at}.attn.query.proj", inner).unflatten(1, (heads, width)).flatten(3)
                weights = torch.einsum("bhdq,bdk->bhqk", query, sides[0]) / width**0.5
                seen = torch.einsum("bhqk,bdk->bhdq", weights.softmax(-1), sides[1])
                new = conv(f"{at}.attn.output.proj", seen.reshape(len(x), -1, *x.shape[2:]))
            else:
                new = invert(at, x, stride)
            if block != "edge":
                new = new * w[f"{at}.layer_scale.gamma"][:, None, None]
            x = new if number == 0 else x + new
        ends.append(x)
    fine, coarse = ends[2:]
    x = invert(
        "msfa.ffn", torch.cat([fine, coarse.repeat_interleave(2, 2).repeat_interleave(2, 3)], 1)
    )
    return norm("msfa.norm", F.avg_pool2d(x, x.shape[2] // side)).flatten(2).transpose(1, 2)


@pytest.mark.exhaustive
def test_gemma_3n_hears_and_sees(tmp_path):
    """transformers' whole class needs timm, for images."""
    name = "Gemma3nForConditionalGeneration"
    names = ["<eoi>", "<image>", "<eoa>", "<audio>"]
    pixels = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 128, "width": 128}}
    settings = {"feature_size": 16, **pixels}
    table = written(tmp_path, name, names, preprocessor_config=settings)
    text_config = hf.Gemma3nTextConfig(**table["text_config"], attn_implementation="eager")
    model, _ = randomised(hf.Gemma3nForCausalLM(text_config))
    config = hf.Gemma3nAudioConfig(**table["audio_config"])
    encoder, w = randomised(gemma3n.Gemma3nAudioEncoder(config))
    embedder, p = randomised(gemma3n.Gemma3nMultimodalEmbedder(config, model.config))
    vision = types.SimpleNamespace(**{"rms_norm_eps": 1e-6, **table["vision_config"]})
    sights, q = randomised(gemma3n.Gemma3nMultimodalEmbedder(vision, model.config))
    v = {
        part: tensor * (tensor[0].numel() ** -0.5 if tensor.dim() == 4 else 1)
        for part, tensor in random_weights(mobilenet_shapes(32)).items()
    }
    text = {
        part.replace("model.", "model.language_model.", 1): tensor
        for part, tensor in model.state_dict().items()
    }
    stored(
        tmp_path, text, prefixed(w, "model.audio_tower."), prefixed(p, "model.embed_audio."),
        prefixed(v, "model.vision_tower.timm_model."), prefixed(q, "model.embed_vision."),
    )  # fmt: skip
    heard = []
    for sound in HEARD:
        tensors, tokens = item(tmp_path, name, sound)
        mask = tensors["input_features_mask"][None].bool()
        with torch.inference_mode():
            states = encoder(tensors["input_features"][None], ~mask)
            soft = embedder(inputs_embeds=states.last_hidden_state)[0][~states.audio_mel_mask[0]]
            fill, end = embedder(input_ids=torch.tensor([[511, 482]]))[0].split(1)
        assert 0 < len(soft) < 20
        assert tokens.tolist().count(483) == 20
        heard.append(torch.cat([soft, fill.expand(20 - len(soft), -1), end]))
    pictures, seen = images(((60, 40), (30, 90))), []
    reader = processor_of(name, tmp_path).image_processor
    for picture in pictures:
        pixels = reader(images=[picture], return_tensors="pt")["pixel_values"]
        assert pixels.shape == (1, 3, 128, 128)
        with torch.inference_mode():
            soft = sights(inputs_embeds=mobilenet(v, pixels, 4)[0] * 32**0.5)
            seen.append(torch.cat([soft, sights(input_ids=torch.tensor([480]))]))

    def layers(ids):
        return {"per_layer_inputs": model.model.get_per_layer_inputs(ids)}

    both = {"image": pictures[:1], "audio": HEARD[:1]}
    mixed = {"prompt": "A <audio> of <image> is", "multi_modal_data": both}
    check(
        tmp_path, "The <image> of <image> is", model, seen, [481, 480], more=layers,
        heard=pictures, kind="image", mixed=[mixed],
    )  # fmt: skip
    check(tmp_path, "The <audio> of <audio> is", model, heard, [483, 482], more=layers)


@pytest.mark.exhaustive
def test_minicpm_o_hears_chunks_up_to_their_own(tmp_path):
    """Whisper's layers with a mask; pairs of frames are averaged after the projector."""
    name = "MiniCPMO"
    table = written(tmp_path, name, [*MINICPM, "<|audio_start|>", "<|audio_end|>"])
    ours = ("vision_config", "audio_config", "slice_config")
    keys = {key: value for key, value in table.items() if key not in ours}
    model = text_model("Qwen2", {**keys, "model_type": "qwen2"})
    config = whisper_config(table["audio_config"])
    encoder, w = randomised(whisper.WhisperEncoder(config))
    p = random_weights({
        "linear1.weight": (64, 32), "linear1.bias": (64,), "linear2.weight": (64, 64),
        "linear2.bias": (64,),
    })  # fmt: skip
    stored(
        tmp_path, random_weights(minicpm_shapes()), prefixed(model.state_dict(), "llm."),
        prefixed(w, "apm."), prefixed(p, "audio_projection_layer."),
        {"tts.head.weight": torch.ones(2)},
    )  # fmt: skip
    embeddings = []
    for sound in HEARD:
        tensors, tokens = item(tmp_path, name, sound)
        mel = tensors["audio_features"]
        assert mel.shape[1] == -(-len(sound) // 160)
        with torch.inference_mode():
            x = F.gelu(encoder.conv2(F.gelu(encoder.conv1(mel[None])))).transpose(1, 2)
            x = x + encoder.embed_positions.weight[: x.shape[1]]
            chunk = torch.arange(x.shape[1]) // 10
            mask = torch.zeros(len(chunk), len(chunk))
            mask[chunk[:, None] < chunk] = -torch.inf
            for layer in encoder.layers:
                x = layer(x, mask[None, None])
                x = x[0] if isinstance(x, tuple) else x
            x = linear(p, "linear2", linear(p, "linear1", encoder.layer_norm(x[0])).relu())
        embeddings.append(x[: len(x) // 2 * 2].view(-1, 2, 64).mean(1))
        starts = tokens.tolist().count(table_id(tmp_path, "<|audio_start|>"))
        assert starts == -(-len(embeddings[-1]) // 5)
    text = "The (<audio>./</audio>) of (<audio>./</audio>) is"
    both = {"image": images(((40, 60),)), "audio": HEARD[:1]}
    mixed = {"prompt": "A (<audio>./</audio>) of (<image>./</image>) is", "multi_modal_data": both}
    check(tmp_path, text, model, embeddings, 480, mixed=[mixed])


def test_the_forced_aligner_has_classes_of_tokens(tmp_path):
    """transformers' aligner, with the names of Qwen's files."""
    name = "Qwen3ASRForcedAlignerForTokenClassification"
    table = written(tmp_path, name, ["<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"])
    file = tmp_path / "tokenizer_config.json"
    named = {"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>",
             "audio_eos_token": "<|audio_end|>"}  # fmt: skip
    settings = {**json.loads(file.read_text()), "extra_special_tokens": named, **named}
    file.write_text(json.dumps(settings))
    inner = table["thinker_config"]
    config = hf.Qwen3ASRConfig(
        audio_config=inner["audio_config"], text_config=inner["text_config"], audio_token_id=480,
        num_labels=24, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model, w = randomised(hf.Qwen3ASRForTokenClassification(config))
    extractor = {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "feature_size": 16,
                 "n_window": 50}  # fmt: skip
    names = {"processor_class": "Qwen3ASRProcessor", "feature_extractor": extractor}
    (tmp_path / "processor_config.json").write_text(json.dumps(names))
    renamed = {}
    for old, tensor in w.items():
        new = old.removeprefix("model.")
        for one, other in (
            ("score.", "lm_head."),
            ("language_model.", "model."),
            ("multi_modal_projector.linear_", "audio_tower.proj"),
        ):
            new = new.replace(one, other)
        renamed[f"thinker.{new}"] = tensor
    stored(tmp_path, renamed)
    read = processor_of(name, tmp_path)
    text = "<|audio_start|><|audio_pad|><|audio_end|>Once upon a time"
    (sound,) = HEARD[:1]
    inputs = read(
        text=[text], audio=[sound], sampling_rate=16000, return_tensors="pt",
        add_special_tokens=False,
    )  # fmt: skip
    with torch.inference_mode():
        expected = model(**inputs).logits[0].softmax(-1)
    with modulm.LLM(str(tmp_path), **CPU) as llm:
        prompt = {"prompt": text, "multi_modal_data": {"audio": sound}}
        (output,) = llm.encode(prompt, pooling_task="token_classify", use_tqdm=False)
    assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
    assert (torch.from_numpy(np.array(output.outputs.data)) - expected).abs().max() < 1e-4


def test_kaldis_spectrogram():
    (sound,) = sounds((0.4,))
    samples = torch.from_numpy(sound).double() * 32768
    frames = samples.unfold(0, 400, 160)
    frames = frames - frames.mean(1, keepdim=True)
    before = torch.cat([frames[:, :1], frames[:, :-1]], dim=1)
    hann = torch.hann_window(400, periodic=False, dtype=torch.float64)
    windows = {
        "povey": hann**0.85,
        "hamming": torch.hamming_window(400, False, dtype=torch.float64),
    }
    low, high = (1127 * np.log1p(hz / 700) for hz in (20, 8000))
    edges = torch.linspace(low, high, 18, dtype=torch.float64)
    mels = 1127 * torch.log1p(torch.arange(257) * 31.25 / 700)
    up = (mels - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    down = (edges[2:, None] - mels) / (edges[2:] - edges[1:-1])[:, None]
    filters = torch.minimum(up, down).clamp(min=0)
    for name, window in windows.items():
        power = torch.fft.rfft((frames - 0.97 * before) * window, 512).abs() ** 2
        expected = (power @ filters.T).clamp(min=1.192092955078125e-07).log()
        actual = kaldi_mels(sound * 32768, bins=16, window=name)
        assert np.abs(actual - expected.numpy()).max() < 1e-3
    with pytest.raises(ValueError, match="25 ms"):
        kaldi_mels(sound[:300])


def test_torchaudios_decibels():
    (sound,) = sounds((0.4,))
    window = torch.hann_window(512)
    power = (
        torch.stft(torch.from_numpy(sound), 512, 160, 512, window, return_complex=True).abs() ** 2
    )
    top = 2595 * np.log10(1 + 8000 / 700)
    edges = torch.from_numpy(700 * (10 ** (np.linspace(0, top, 18) / 2595) - 1))
    hz = torch.linspace(0, 8000, 257, dtype=torch.float64)
    up = (hz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    down = (edges[2:, None] - hz) / (edges[2:] - edges[1:-1])[:, None]
    filters = torch.minimum(up, down).clamp(min=0)
    levels = 10 * (filters @ power.double()).clamp(min=1e-10).log10()
    expected = levels.clamp(min=levels.max() - 30)
    actual = decibel_mels(
        sound, rate=16000, bins=16, fft=512, length=512, hop=160, low=0, high=8000, loudness=30
    )
    assert np.abs(actual - expected.numpy()).max() < 1e-3


@pytest.mark.parametrize(
    ("name", "wrong", "field"),
    [
        ("UltravoxModel", {"text_model_id": "a/b", "text_config": None}, "text_model_id"),
        ("UltravoxModel", {"audio_config": 3}, "audio_config"),
        ("MoonshotKimiaForCausalLM", {"kimia_adaptor_input_dim": 8}, "kimia_adaptor_input_dim"),
        ("FunAudioChatForConditionalGeneration", {"text_config": None}, "text_config"),
        ("FunASRForConditionalGeneration", {"audio_encoder_conf": None}, "audio_encoder_conf"),
        ("FireRedASR2ForConditionalGeneration", {"audio_encoder_conf": 1}, "audio_encoder_conf"),
        ("MiDashengLMModel", {"audio_encoder_config": None}, "audio_encoder_config"),
        ("MossAudioModel", {"language_config": None}, "language_config"),
        (
            "Qwen3ASRForcedAlignerForTokenClassification",
            {"thinker_config": {"classify_num": 0}}, "classify_num",
        ),
    ],
)  # fmt: skip
def test_what_these_models_cannot_be_is_refused(name, wrong, field):
    table, config = driver(name).tiny(), driver(name).config_type
    with pytest.raises((CheckpointError, UnsupportedError), match=field):
        read_config({**table, **wrong}, config, "config.json")


def test_sounds_that_are_too_short_are_refused(tmp_path):
    name = "FireRedASR2ForConditionalGeneration"
    ones = [1.0] * 16
    mel = {"num_mel_bins": 16, "means": ones, "inverse_std_variences": ones}
    written(tmp_path, name, ["<|AUDIO|>"], preprocessor_config=mel)
    load_processor.cache_clear()
    for count in (300, 800):
        with pytest.raises(RequestError, match="less than"):
            item(tmp_path, name, np.ones(count, np.float32))
