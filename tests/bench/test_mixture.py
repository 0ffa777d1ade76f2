"""Options of `bench/mixture.py`, and what its tokens cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

CONFIG = {
    "vocab_size": 100, "hidden_size": 8, "intermediate_size": 99, "moe_intermediate_size": 4,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "num_experts": 6, "num_experts_per_tok": 3, "tie_word_embeddings": True,
}  # fmt: skip
EXPERT, SHARED, HEAD = 3 * 8 * 4, 2 * 8 * (8 + 4) + 8 * 6, 8 * 100


@pytest.fixture
def mixture(bench_script: Callable[[str], ModuleType]) -> ModuleType:
    return bench_script("mixture")


def test_defaults(mixture: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mixture.py", str(tmp_path)])
    options = mixture.parsed()
    assert vars(options) == {
        "folder": tmp_path, "shape": "small", "layers": None, "quantization": None, "streams": 1,
        "prompt": 0, "rounds": 9, "write": False, "peer": True, "json": None,
    }  # fmt: skip
    assert json.loads((tmp_path / "config.json").read_text()) == mixture.SHAPES["small"]
    assert not (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "tokenizer.json").exists()


def test_fewer_layers_have_as_much_less_vocabulary(mixture: ModuleType, tmp_path: Path) -> None:
    arguments = ["--shape", "qwen3-30b-a3b", "--layers", "4", "--quantization", "int8"]
    options = mixture.parsed([str(tmp_path), *arguments, "--no-peer", "--json", "figures.json"])
    assert (options.quantization, options.peer) == ("int8", False)
    assert options.json == Path("figures.json")
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"]) == (4, 198 * 64)
    assert config == mixture.config_of(options)
    assert mixture.SHAPES["qwen3-30b-a3b"]["num_hidden_layers"] == 48


def test_a_small_vocabulary_keeps_the_tokenizers_ids(mixture: ModuleType) -> None:
    config = mixture.config_of(SimpleNamespace(shape="small", layers=1))
    assert config["vocab_size"] == 1344
    config = mixture.config_of(SimpleNamespace(shape="qwen3-30b-a3b", layers=None))
    assert config["vocab_size"] == 151936


def test_a_folder_with_a_model_is_kept(mixture: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    mixture.parsed([str(tmp_path), "--write"])
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_of_other_sizes_is_refused(
    mixture: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture.parsed([str(tmp_path)])
    with pytest.raises(SystemExit):
        mixture.parsed([str(tmp_path), "--layers", "6"])
    assert "num_hidden_layers 24, not 6: take another folder" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--quantization", "fp8"], ["--shape", "large"], []])
def test_unknown_options_are_refused(
    mixture: ModuleType, tmp_path: Path, arguments: list[str]
) -> None:
    folder = [str(tmp_path)] if arguments else []
    with pytest.raises(SystemExit):
        mixture.parsed([*folder, *arguments])


@pytest.mark.parametrize(
    ("quantization", "experts", "linears", "head"),
    [(None, 16, 16, 16), ("int8", 8, 8, 8), ("int4", 4.5, 4.5, 8)],
)
def test_bytes_of_a_step(
    mixture: ModuleType, quantization: str | None, experts: float, linears: float, head: float
) -> None:
    costs = mixture.Costs(CONFIG, quantization)
    cache = 3 * 10 * 2 * 4 * 2  # bytes of 3 streams of 10 tokens, keys and values, in one layer
    layer = (5 * EXPERT * experts + SHARED * linears) / 8 + cache
    assert costs.bytes_of_step(3, 5, 10) == 2 * layer + HEAD * head / 8


def test_weights_and_operations(mixture: ModuleType) -> None:
    costs = mixture.Costs(CONFIG, None)
    assert costs.parameters() == 2 * (6 * EXPERT + SHARED) + HEAD
    untied = mixture.Costs({**CONFIG, "tie_word_embeddings": False}, None)
    assert untied.parameters() == costs.parameters() + HEAD
    per_layer = 3 * EXPERT + SHARED + 2 * 8 * 20
    assert costs.flops(7, 20, 1) == 2 * (7 * 2 * per_layer + HEAD)


def test_a_shape_without_its_own_sizes(mixture: ModuleType) -> None:
    """Experts as wide as the dense layer, heads that share the hidden size."""
    config = {
        key: CONFIG[key] for key in CONFIG if key not in ("moe_intermediate_size", "head_dim")
    }
    costs = mixture.Costs({**config, "intermediate_size": 4}, None)
    assert costs.bytes_of_step(1, 3, 0) == mixture.Costs(CONFIG, None).bytes_of_step(1, 3, 0)
