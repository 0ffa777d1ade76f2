"""A model quantized at load: near the plain one, in less memory, the table of tokens intact."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from samples import parametrize_sample, sample

from modulm import LLM, SamplingParams
from modulm.cli.main import main
from modulm.errors import CheckpointError, ConfigError
from modulm.testing.checkpoints import make_tiny

PROMPT = "The quick brown fox jumps over the lazy dog and the capital of France is"
FORMS = [
    ("int8", {}, 0.15),
    ("int8", {"activations": "bf16"}, 0.15),
    ("fp8", {}, 0.6),
    ("int4", {"group_size": 32}, 2.5),
    ("int4", {"group_size": 64, "activations": "bf16"}, 2.5),
    ("fp8_per_tensor", {}, 0.6),
    ("fp8_per_block", {"ignore": ["o_proj"]}, 0.6),
    ("mxfp8", {}, 0.6),
    ("mxfp4", {"targets": {"re:.*mlp": "int8"}}, 2.5),
]


def open_llm(path: Path, **settings) -> LLM:
    return LLM(model=str(path), kv_cache_memory_bytes=1 << 24, cpu_threads=1, **settings)


def scores(engine: LLM) -> list[float]:
    """The log probability of each token of the prompt."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    (output,) = engine.generate(PROMPT, params, use_tqdm=False)
    pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
    return [entry[token].logprob for token, entry in pairs]


@pytest.fixture(
    scope="module",
    params=sample([pytest.param(True, id="tied"), pytest.param(False, id="untied")], every=2),
)
def checkpoint(request, tmp_path_factory) -> Path:
    return make_tiny(
        tmp_path_factory.mktemp("tiny"),
        "Qwen3ForCausalLM",
        dtype="bfloat16",
        tie_word_embeddings=request.param,
        hidden_size=128,
        intermediate_size=192,
    )


@pytest.fixture(scope="module")
def plain(checkpoint) -> list[float]:
    with open_llm(checkpoint) as engine:
        return scores(engine)


@parametrize_sample(("name", "settings", "distance"), FORMS, every=4)
def test_close_to_the_plain_model(checkpoint, plain, name, settings, distance):
    with open_llm(checkpoint, quantization=name, quantization_config=settings) as engine:
        quantized = scores(engine)
        single = engine.generate(
            PROMPT, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False
        )
        crowd = engine.generate(
            ["a", PROMPT, "one two three"],
            SamplingParams(temperature=0, max_tokens=8),
            use_tqdm=False,
        )
    assert quantized != plain
    assert math.sqrt(
        sum((a - b) ** 2 for a, b in zip(quantized, plain, strict=True)) / len(plain)
    ) < (distance)
    assert crowd[1].outputs[0].token_ids == single[0].outputs[0].token_ids


def test_the_embedded_model_still_knows():
    question = [{"role": "user", "content": "What is the capital of France?"}]
    for name in ("int8", "int4", "fp8"):
        with LLM(model="demo", quantization=name, kv_cache_memory_bytes=1 << 24) as engine:
            params = SamplingParams(temperature=0, max_tokens=200)
            (output,) = engine.chat(question, params, use_tqdm=False)
            assert "Paris" in output.outputs[0].text


def test_explain_says_what_stays_otherwise(checkpoint, capsys):
    for settings in ('{"group_size": 64}', '{"group_size": 128}'):
        flags = ["--quantization", "int4", "--quantization-config", settings]
        with pytest.raises(SystemExit):
            main(["explain", str(checkpoint), "--all", *flags])
    output = capsys.readouterr().out
    assert "the head keeps int8" in output
    assert "int4 at load supports linear layers and experts, not embedding" in output
    assert "192 inputs are not whole groups of 128; model.layers.*.mlp.down_proj)" in output


def test_explain_names_the_scheme_of_each_layer(checkpoint, capsys):
    flags = [
        "--quantization",
        "fp8_per_block",
        "--quantization-config.ignore+",
        "layers.0.mlp.down_proj",
    ]
    flags += ["--quantization-config.targets", '{"re:.*o_proj": "int8"}']
    with pytest.raises(SystemExit):
        main(["explain", str(checkpoint), *flags])
    lines = [line for line in capsys.readouterr().out.splitlines() if "quantization (" in line]
    attention, out, first, second = (
        next(line for line in lines if part in line)
        for part in ("qkv_proj", "o_proj", "mlp.down_proj of 0", "mlp.down_proj of 1")
    )
    assert attention.startswith(
        "quantization (linear): fp8_per_block (fp8, a scale per 128 x 128; "
        "model.layers.*.self_attn.qkv_proj, model.layers.*.mlp.gate_up_proj"
    )
    assert out == (
        "quantization (linear): fp8_per_block (int8, a scale per output; "
        "model.layers.*.self_attn.o_proj)"
    )
    assert first.startswith("quantization (linear): none")
    assert "fp8_per_block (fp8" in second


def test_unknown_activations_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="activations.*must be in.*int3"):
        open_llm(checkpoint, quantization="int8", quantization_config={"activations": "int3"})


def test_a_stored_format_for_a_plain_checkpoint_is_named(checkpoint):
    message = r"\(--quantization is awq; config.json has no quantization_config\): the weights"
    with pytest.raises(CheckpointError, match=message):
        open_llm(checkpoint, quantization="awq", quantization_config={"group_size": 32})
