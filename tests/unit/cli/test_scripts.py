"""Command lines and YAML files as users of vLLM have them, with the program's name changed.

Each is read by the command it names: every flag works, is accepted with a reason, or is refused
with what to use. Nothing is run.
"""

from __future__ import annotations

import shlex
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
import pytest
from samples import parametrize_sample

from modulm.config.sources import Draft
from modulm_server.flags import ServerConfig

ACCEPTED = [
    "serve Qwen/Qwen1.5-32B-Chat-AWQ --max-model-len 4096",
    "serve fxmarty/qwen_1.5-moe-a2.7b-mxfp4 --tensor-parallel-size 1",
    (
        "serve meta-llama/Llama-3.1-8B-Instruct --dtype bfloat16 --max-model-len 32k"
        " --gpu-memory-utilization 0.9 --max_num_seqs 64 --max-num-batched-tokens 8192"
        " --enable-chunked-prefill --enable-prefix-caching"
    ),
    (
        "serve NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123"
        " --host 0.0.0.0 --port 8000 --generation-config vllm"
    ),
    (
        "serve Qwen/Qwen3-8B --reasoning-parser qwen3 --enable-auto-tool-choice"
        " --tool-call-parser hermes --default-chat-template-kwargs '{\"enable_thinking\": false}'"
    ),
    'serve BAAI/bge-base-en-v1.5 --runner pooling --pooler-config \'{"pooling_type": "CLS"}\'',
    "serve m --scheduling-policy priority --async-scheduling --long-prefill-token-threshold 512",
    "serve m --hf-overrides.rope_scaling.rope_type yarn --hf-overrides.rope_scaling.factor 4.0",
    (
        "serve m --uvicorn-log-level warning --disable-uvicorn-access-log --ssl-keyfile k"
        " --ssl-certfile c --root-path /api --allowed-origins '[\"https://a\"]' --middleware x.y"
        " --enable-request-id-headers --disable-fastapi-docs --log-config-file log.json"
    ),
    "serve m --served-model-name gpt-4 gpt-4o --api-key a b --seed 7 -asc 2",
    "serve m --distributed-executor-backend ray -tp 2",
    "serve facebook/opt-13b --data-parallel-size 4 --data-parallel-size-local 2",
    "chat --url http://localhost:8000/v1 --model-name m --system-prompt 'Be kind.'",
    'chat --quick "hi"',
    "complete --url http://localhost:8000/v1 --quick 'The future of AI is' --max-tokens 20",
    (
        "bench latency --model meta-llama/Llama-3.2-1B-Instruct --input-len 32 --output-len 1"
        " --enforce-eager --load-format dummy"
    ),
    (
        "bench throughput --model meta-llama/Llama-3.2-1B-Instruct --input-len 32 --output-len 1"
        " --dataset-name sonnet --num-prompts 10 --async-engine"
    ),
    (
        "bench serve --model meta-llama/Llama-3.2-1B-Instruct --host server-host --port 8000"
        " --random-input-len 32 --random-output-len 4 --num-prompts 5 --request-rate 2"
    ),
    (
        "bench serve --backend vllm --endpoint /v1/completions --dataset-name sharegpt"
        " --dataset-path ShareGPT.json --max-concurrency 9 --goodput ttft:200 tpot:50 --save-result"
        " --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99"
    ),
    "run-batch -i in.jsonl -o results.jsonl --model meta-llama/Meta-Llama-3-8B-Instruct",
    "run-batch -i https://a/in.jsonl -o https://a/out --model m --enable-metrics --port 8100",
    (
        'serve m --enable-lora --lora-modules a=x \'{"name": "b", "path": "y", "base_model_name":'
        ' "z"}\' --max-loras 4 --max-cpu-loras 8 --max-lora-rank 64 --lora-dtype bfloat16'
        " --fully-sharded-loras --allow-runtime-lora-updating"
    ),
    "run-batch -i in.jsonl -o out.jsonl --model m --enable-lora --lora-modules a=x b=y",
    "bench serve --lora-modules a b --num-prompts 8",
    "collect-env",
]
#: A line, a flag with a note, and words of the reason.
NOTED = [
    ("serve m --task generate", "--task", "use --runner"),
    ("serve m --swap-space 8", "--swap-space", "no effect"),
    ("serve m --enable-lora-bias", "--enable-lora-bias", "always applied"),
    ("serve m --lora-extra-vocab-size 512", "--lora-extra-vocab-size", "no effect"),
    (
        "serve m --guided-decoding-backend xgrammar",
        "--guided-decoding-backend",
        "use --structured-outputs-config.backend",
    ),
]
REFUSED = [
    ("serve gpt2 -pcp 2", "--prefill-context-parallel-size: not supported yet"),
    ("serve m --distributed-executor-backend dask", "no installed plugin provides executor 'dask'"),
    (
        'serve m --enable-lora --default-mm-loras \'{"smell": "x"}\'',
        "--default-mm-loras: 'smell' must be image, audio or video",
    ),
    ("serve m --enable-lora --max-loras 4 --max-cpu-loras 2", "--max-cpu-loras: 2 is less than"),
    ("serve m --enable-lora --max-lora-rank 1024", "--max-lora-rank: 1024 is above"),
    ('serve m --rope-scaling \'{"rope_type": "linear"}\'', "--rope-scaling: refused: --hf-over"),
    ("serve m --num-lookahead-slots 2", "--num-lookahead-slots: refused: use --speculative-con"),
    ("serve m --otlp-traces-endpoint a:1", "--otlp-traces-endpoint: 'a:1' must begin with http:"),
    ("serve m --collect-detailed-traces all", "--collect-detailed-traces: not supported yet"),
    (
        "serve m --tool-call-parser none-such",
        "tool parser 'none-such'; `modulm plugins list tool_parsers` lists the installed ones",
    ),
    ("serve m --attention-backend none-such", "'none-such'; installed: cpu_paged, flash_attn,"),
    ("serve m --max-model-len many", "--max-model-len"),
    ("serve m --max-modl-len 5", "No such option '--max-modl-len'"),
    ("serve m --model-lenght 5", "Did you mean one of: '--max-model-len'"),
]


def read(line: str) -> dict[str, Any]:
    """What the command that a line names makes of it."""
    arguments = shlex.split(line)
    (point,) = entry_points(group="modulm.commands", name=arguments.pop(0))
    command: Any = point.load()
    while isinstance(command, click.Group):
        command = command.commands[arguments.pop(0)]
    return dict(command.make_context(str(command.name), arguments).params)


@parametrize_sample("line", ACCEPTED, every=4)
def test_scripts_that_work(line: str) -> None:
    """Every option of the line has arrived, and there is nothing to remark."""
    params = read(line)
    draft = params.get("draft")
    origins = draft.origins if isinstance(draft, Draft) else {}
    arrived = {*origins, *(name for name, value in params.items() if value not in (None, (), ""))}
    options = [word for word in shlex.split(line) if word.startswith("--")]
    names = {word[2:].partition("=")[0].partition(".")[0].replace("-", "_") for word in options}
    assert names - arrived == set()
    assert draft is None or draft.notices == ()


@pytest.mark.parametrize(("line", "flag", "message"), NOTED)
def test_scripts_that_are_told_something(line: str, flag: str, message: str) -> None:
    (notice,) = read(line)["draft"].notices
    assert notice.flag == flag
    assert message in notice.message


@parametrize_sample(("line", "message"), REFUSED, every=3)
def test_scripts_that_are_refused(line: str, message: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        read(line)
    assert message in caught.value.format_message()


YAML = """
model: meta-llama/Llama-3.1-8B-Instruct
host: "127.0.0.1"
port: 6379
uvicorn-log-level: "info"
dtype: bfloat16
max-model-len: 16k
served_model_name: [llama, gpt-4]
enable-prefix-caching: true
no-enable-chunked-prefill: true
hf-overrides:
  rope_scaling: {rope_type: yarn, factor: 4.0}
structured-outputs-config:
  disable_any_whitespace: true
api-key:
  - one
  - two
"""


def test_a_file_as_vllm_s_documents_write_it(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(YAML)
    config = read(f"serve --config {path} --port 8001")["draft"].config
    assert config.model.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert (config.group(ServerConfig).host, config.group(ServerConfig).port) == ("127.0.0.1", 8001)
    assert config.model.max_model_len == 16_000
    assert config.model.served_model_name == ("llama", "gpt-4")
    assert config.cache.enable_prefix_caching is True
    assert config.scheduler.enable_chunked_prefill is False
    assert config.model.hf_overrides["rope_scaling"]["factor"] == 4.0
    assert config.structured_outputs.disable_any_whitespace is True
    assert config.group(ServerConfig).api_key == ("one", "two")
    other = read(f"serve Qwen/Qwen3-8B --config {path}")["draft"].config
    assert other.model.model == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "did you mean"),
        ("collect-detailed-traces: all", "--collect-detailed-traces: not supported yet"),
        ("port: [1]", "--port"),
    ],
)
def test_a_file_with_a_mistake_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(click.UsageError) as caught:
        read(f"serve m --config {path}")
    assert message in caught.value.format_message()
