"""What cannot run is told by its name, in one sentence that says what works instead."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from samples import parametrize_sample

import modulm
from modulm.errors import ModulmError
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm.plugins.selection import Selection
from modulm.testing.checkpoints import make_tiny

LONGEST = 300


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("plain") / "model")


def refusal(path: Path, off: str = "") -> str:
    """What is said of a checkpoint, with some packages switched off; one line, not a list."""
    with manager.using(PluginManager(Selection.parse(off))), pytest.raises(ModulmError) as caught:
        modulm.LLM(str(path), max_model_len=64)
    message = str(caught.value).replace(str(path), "PATH")
    assert "\n" not in message
    assert len(message) < LONGEST, message
    return message


def lora(folder: Path, plain: Path) -> Path:
    folder.mkdir()
    table = {"peft_type": "LORA", "base_model_name_or_path": "owner/Base"}
    (folder / "adapter_config.json").write_text(json.dumps(table))
    (folder / "adapter_model.safetensors").touch()
    shutil.copy(plain / "tokenizer.json", folder)
    return folder


def diffusion(folder: Path, plain: Path) -> Path:
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    return folder


def of(**config: object) -> Callable[[Path, Path], Path]:
    """A folder with this config.json."""

    def make(folder: Path, plain: Path) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def without(*patterns: str) -> Callable[[Path, Path], Path]:
    """A checkpoint that lacks some files."""

    def make(folder: Path, plain: Path) -> Path:
        shutil.copytree(plain, folder)
        for path in [path for pattern in patterns for path in folder.glob(pattern)]:
            path.unlink()
        return folder

    return make


def stored(method: str) -> Callable[[Path, Path], Path]:
    """A checkpoint that says how its weights are quantized."""

    def make(folder: Path, plain: Path) -> Path:
        shutil.copytree(plain, folder)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def pickled(folder: Path, plain: Path) -> Path:
    without("*.safetensors")(folder, plain)
    torch.save({"a": torch.zeros(2)}, folder / "pytorch_model.bin")
    return folder


def one_file(name: str, content: bytes) -> Callable[[Path, Path], Path]:
    def make(folder: Path, plain: Path) -> Path:
        folder.mkdir()
        (folder / name).write_bytes(content)
        return folder / name

    return make


def gguf_folder(folder: Path, plain: Path) -> Path:
    folder.mkdir()
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF" + bytes(20))
    return folder


def weights_alone(folder: Path, plain: Path) -> Path:
    shutil.copytree(plain, folder)
    return folder / "model.safetensors"


SPEECH = {"architectures": ["Wav2Vec2ForCTC"], "model_type": "wav2vec2",
          "feat_extract_norm": "group"}  # fmt: skip
WHISPER = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper",
           "is_encoder_decoder": True, "num_mel_bins": 80}  # fmt: skip


@parametrize_sample(
    ("make", "off", "expected"),
    [
        (lora, "", ("LoRA adapter", "owner/Base", "--enable-lora --lora-modules NAME=PATH")),
        (diffusion, "", ("diffusion pipeline", "only text models are supported")),
        (of(**SPEECH), "", ("speech model", "transcripts")),
        (of(**SPEECH), "-modulm-transformers", ("speech model", "transcripts")),
        (of(**WHISPER), "-modulm-whisper", ("speech model", "pip install modulm-whisper")),
        (of(architectures=["BartForConditionalGeneration"], model_type="bart",
            is_encoder_decoder=True), "-modulm-bart,-modulm-transformers",
         ("encoder-decoder", "pip install modulm-bart")),
        (of(architectures=["OwnEncoderDecoder"], model_type="own", is_encoder_decoder=True), "",
         ("encoder-decoder", "no package")),
        (without("*token*"), "", ("no tokenizer", "--tokenizer", "--skip-tokenizer-init")),
        (without("config.json"), "", ("config.json", "--hf-config-path")),
        (without("*"), "", ("config.json", "not a checkpoint")),
        (without("*.safetensors"), "", ("no weights",)),
        (pickled, "-modulm-loader-pt", ("no weights", "pip install modulm-loader-pt")),
        (one_file("model.bin", b"\x80\x02"), "-modulm-loader-pt",
         ("no weights", "pip install modulm-loader-pt")),
        (one_file("model.gguf", b"GGUF" + bytes(20)), "-modulm-quant-gguf",
         ("no weights", "pip install modulm-quant-gguf")),
        (gguf_folder, "-modulm-quant-gguf", ("config.json", "pip install modulm-quant-gguf")),
        (one_file("model.gguf", b"GGUF" + bytes(20)), "", ("version 0",)),
        (one_file("model.onnx", b"abc"), "", ("no weights",)),
        (weights_alone, "", ("use the folder that contains it",)),
        *((stored(method), f"-modulm-quant-{method}",
           (method, "unquantized", f"pip install modulm-quant-{method}"))
          for method in ("awq", "gptq", "fp8", "bitsandbytes")),
        (stored("nonsense"), "", ("'nonsense'", "unquantized")),
        (of(architectures=["NobodyForCausalLM"], model_type="nobody"), "",
         ("NobodyForCausalLM", "--model-impl transformers")),
    ], every=3,
)  # fmt: skip
def test_it_is_told_what_it_is(
    make: Callable[[Path, Path], Path], off: str, expected: tuple[str, ...], plain: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    message = refusal(make(tmp_path / "given", plain), off)
    for word in expected:
        assert word in message, message


def test_a_name_of_nothing(tmp_path: Path) -> None:
    assert "neither a folder nor a hub id" in refusal(tmp_path / "gone")
