"""Settings that list layers by their names in files, for models that call these otherwise."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import parametrize_sample

from modulm.config import EngineConfig
from modulm.loading import resolve_checkpoint
from modulm.loading.model import build_model, plan_checkpoint
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm_quantized import native_patterns

GROUP = 16
TEXT = re.compile(r"(?<!encoder\.)layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight$")
TOWER = re.compile(r"\w*(vision|visual|audio|projector|connector)\w*")
EMBEDDING = re.compile(r"embed|position")


def fp8(weight):
    return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": torch.ones(())}


def fp8_rows(weight):
    return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": torch.ones(len(weight), 1)}


def awq(weight):
    outputs, inputs = weight.shape
    return {
        "qweight": torch.zeros(inputs, outputs // 8, dtype=torch.int32),
        "qzeros": torch.zeros(inputs // GROUP, outputs // 8, dtype=torch.int32),
        "scales": torch.ones(inputs // GROUP, outputs, dtype=torch.float16),
    }


def gptq(weight):
    outputs, inputs = weight.shape
    return {**awq(weight), "qweight": torch.zeros(inputs // 8, outputs, dtype=torch.int32)}


def paths(names):
    """All layers by their paths, as LLM Compressor writes them."""
    return ["lm_head", *(name.removesuffix(".weight") for name in names)]


def modules(names):
    """The paths of the modules around them."""
    return sorted({name[: TOWER.search(name).end()] for name in names if TOWER.search(name)})


def words(names):
    return sorted({TOWER.search(name).group() for name in names if TOWER.search(name)})


def patterns(names):
    return ["re:.*lm_head", *(f"re:.*{word}.*" for word in words(names))]


def rules(names):
    return {f"-:.*{word}.*": {} for word in words(names)}


SCHEME = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], **SCHEME}},
}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
#: Settings, the key of their list, how it names layers, and how quantized layers are stored.
METHODS = [
    pytest.param(COMPRESSED, "ignore", paths, fp8_rows, id="compressed-tensors-paths"),
    pytest.param(COMPRESSED, "ignore", patterns, fp8_rows, id="compressed-tensors-patterns"),
    pytest.param(FP8, "modules_to_not_convert", paths, fp8, id="fp8-paths"),
    pytest.param(FP8, "ignored_layers", modules, fp8, id="fp8-modules"),
    pytest.param(AWQ, "modules_to_not_convert", words, awq, id="awq"),
    pytest.param(GPTQ, "dynamic", rules, gptq, id="gptq-rules"),
    pytest.param(GPTQ, "modules_to_not_convert", paths, gptq, id="gptq-paths"),
]
ARCHITECTURES = [
    "Qwen3VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
]


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=[pytest.mark.exhaustive] if number else [])
    for number, name in enumerate(ARCHITECTURES)
])  # fmt: skip
def plain(request, tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp(request.param), request.param)


def write(plain, folder, settings, key, spelled, store):
    """Store the text model's layers in another format; the settings list all other layers."""
    weights = load_file(plain / "model.safetensors")
    stored, others = {}, []
    for name, weight in weights.items():
        if TEXT.search(name) and not TOWER.search(name):
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{part}": tensor for part, tensor in store(weight).items()}
            continue
        stored[name] = weight
        if weight.dim() == 2 and name.endswith(".weight") and not EMBEDDING.search(name):
            others.append(name)
    assert any(map(TOWER.search, others)), f"no layer of an encoder among {sorted(weights)}"
    table = json.loads((plain / "config.json").read_text())
    table["quantization_config"] = {**settings, key: spelled(others)}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(table))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()},
              folder / "model.safetensors")  # fmt: skip


@parametrize_sample("settings, key, spelled, store", METHODS, 7)
def test_lists_name_layers_as_the_files_do(plain, tmp_path, settings, key, spelled, store):
    write(plain, tmp_path, settings, key, spelled, store)
    plugins = manager.current()
    config = EngineConfig().with_parts({"model": str(tmp_path), "device": "cpu"})
    found = resolve_checkpoint(config, plugins)
    built = build_model(found.resolved.config, found.checkpoint, found.platform, plugins)
    plan_checkpoint(built, found.checkpoint)  # raises for tensors that do not fit
    methods = {
        unit.path: unit.module.method.name
        for unit in built.shared.units
        if hasattr(unit.module, "method")
    }
    coded = {path for path, method in methods.items() if method != "none"}
    assert coded == {path for path in methods if re.search(r"^model\.layers\.\d+\.", path)}


def test_a_parameter_of_a_module_with_layers_is_none_of_them():
    """DeepSeek-OCR 2's encoder has positions of four dimensions beside its layers."""

    def covers(name, patterns):
        return any(name.startswith(pattern) for pattern in patterns)

    layers = {"tower.sam": "", "tower.sam.up": "sam_model.up", "text.up": "model.up"}
    assert native_patterns(["model"], covers, layers) == ["text", r"re:text(\.|$)"]
    whole = native_patterns(["sam_model"], covers, layers)
    assert whole == ["tower", r"re:tower(\.|$)"]
