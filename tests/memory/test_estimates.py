"""Estimates of memory equal what is held once a model is loaded, within 5 %.

`make test` tries families with each kind of cache and weights; `--everything` all of the kit's, and
all stored formats.
"""

from __future__ import annotations

import json
import re
from http.server import ThreadingHTTPServer
from threading import Thread

import huggingface_hub
import pytest
from click.testing import CliRunner
from fake_hub import Hub
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from samples import parametrize_sample
from tests.plugins.models.test_contract import ARCHITECTURES
from tests.plugins.quantization import test_published as formats

from modulm import LLM, SamplingParams
from modulm.config import EngineConfig
from modulm.contracts.platform import Memory
from modulm.engine.worker.model_runner import ModelRunner
from modulm.errors import CheckpointError, UnsupportedError
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.models import tiny_folder
from modulm.testing.oracles import oracle_of
from modulm_command_fit.command import command as fit_command
from modulm_memory.advice import changes_for
from modulm_memory.allocations import Allocations
from modulm_memory.estimate import estimate
from modulm_memory.report import report
from modulm_memory.testing import measured
from modulm_server.command import command as serve_command

TOLERANCE = 0.05
#: Tokens of the prompt whose activations are measured.
TOKENS = 255
#: Sliding and latent caches, states; experts, also with a model's own op; sparse attention; tied
#: heads; whole texts; ranks and formats.
SAMPLE = (
    ("Gemma3ForCausalLM", {"quantization": "int4", "kv_cache_dtype": "int8"}),
    ("DeepseekV32ForCausalLM", {"tensor_parallel_size": 2}),
    ("Qwen3NextForCausalLM", {}),
    ("HYV4ForCausalLM", {}),
    ("LlamaBidirectionalModel", {}),
)
AT_LOAD = (None, "int8", "int4", "fp8")
STORED = ("gptq-desc-act",)


def pytest_generate_tests(metafunc):
    everything = metafunc.config.getoption("everything")
    if "architecture" in metafunc.fixturenames:
        more = [
            (name, {"quantization": AT_LOAD[number % 4], "tensor_parallel_size": ranks})
            for number, name in enumerate(ARCHITECTURES)
            for ranks in (1, 2)
        ]
        metafunc.parametrize(("architecture", "flags"), [*SAMPLE, *(more if everything else [])])
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", formats.CASES if everything else STORED)


def configured(folder, **flags):
    return EngineConfig.from_keywords(
        model=str(folder), use_tqdm_on_load=False, num_gpu_blocks_override=8, **flags
    )


def check(folder, steps=True, **flags):
    """steps: whether activations are compared, which layers of a stored format may add to."""
    config, plugins = configured(folder, **flags), manager.current()
    try:
        found = estimate(config, plugins)
    except UnsupportedError as error:  # which loading says as well
        with pytest.raises(UnsupportedError, match=re.escape(str(error))):
            measured(config, plugins, 0, 8)
        return
    tokens = min(found.length - 1, TOKENS)
    for rank in found.ranks:
        held = measured(config, plugins, rank.rank, rank.sizing.blocks, tokens)
        step = rank.widths.step(tokens, 1)
        assert rank.fixed == pytest.approx(held.weights, rel=TOLERANCE)
        assert rank.cache_bytes == held.caches
        assert not rank.weights.notes
        if not steps:
            continue
        assert step == pytest.approx(held.step, rel=TOLERANCE)
        total = held.weights + held.caches + held.step
        assert rank.fixed + rank.cache_bytes + step == pytest.approx(total, rel=TOLERANCE)


def test_families(architecture, flags, tmp_path):
    driver = manager.current().load("models", architecture)
    folder = tiny_folder(driver, tmp_path / "tiny", oracle=oracle_of(driver), dtype="bfloat16")
    check(folder, **flags)


def test_stored_formats(case, tmp_path):
    folder, _ = formats.publish(tmp_path, formats.CASES[case])
    check(folder, steps=False, dtype="bfloat16")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose layers are too large to be measured whole: 12.6 million values each."""
    return make_tiny(
        tmp_path_factory.mktemp("wide"), hidden_size=1024, intermediate_size=2304,
        num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8, dtype="bfloat16",
    )  # fmt: skip


@parametrize_sample("quantization", [None, "int4"], every=2)
def test_parts_stand_for_large_layers(wide, quantization):
    check(wide, quantization=quantization)


def test_activations_of_a_step(monkeypatch):
    """Of a prompt that fills a step: what torch allocates at most, within 5 %."""
    peaks, run = [], ModelRunner.run

    def measured_run(runner, plan):
        with Allocations() as allocations:
            result = run(runner, plan)
        peaks.append(allocations.peak)
        return result

    monkeypatch.setattr(ModelRunner, "run", measured_run)
    llm = LLM("demo", kv_cache_memory_bytes=8 << 20, max_num_seqs=1)
    (rank,) = estimate(llm.info.config, manager.current()).ranks
    params = SamplingParams(max_tokens=1, temperature=0)
    llm.generate([{"prompt_token_ids": [5] * TOKENS}], params, use_tqdm=False)
    llm.shutdown()
    assert rank.widths.step(TOKENS, 1) == pytest.approx(max(peaks), rel=TOLERANCE)


def test_what_does_not_fit_comes_with_commands_that_do(wide):
    """Half of what is needed for the context: a shorter one, smaller caches or weights fit."""
    plugins = manager.current()
    config = EngineConfig.from_keywords(model=str(wide), max_num_seqs=1)
    whole = estimate(config, plugins)
    (rank,) = whole.ranks
    limit = rank.fixed + rank.weights.largest
    one = rank.groups[0].block_bytes * (whole.length // rank.groups[0].block_size)
    memory = Memory(total=limit + one // 2, free=limit + one // 2)
    tight = estimate(config, plugins, memory=memory)
    assert tight.context < tight.length or tight.fits
    small = Memory(total=limit - 1, free=limit - 1)
    refused = estimate(config, plugins, memory=small)
    assert refused.problem == "the weights do not fit"
    changes = changes_for(refused, plugins, {"model", "max_num_seqs"}, config, small, name="m")
    assert changes
    for change in changes:
        other = estimate(config.with_parts(dict(change.flags)), plugins, memory=small)
        assert other.context
        assert change.command.startswith("modulm serve m --max-num-seqs 1 --")


def run(command, *arguments):
    result = CliRunner().invoke(command, [str(one) for one in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_a_dry_run_of_the_server_prints_what_fit_prints(wide):
    flags = (wide, "--max-num-seqs", 2, "--kv-cache-memory-bytes", 1 << 24)
    first, second = run(fit_command, *flags), run(serve_command, *flags, "--dry-run")
    assert first.stdout.startswith(f"{wide} (LlamaForCausalLM)")
    assert first.exit_code == second.exit_code == 0
    static = [line for line in first.stdout.splitlines() if "memory of the device" not in line]
    assert set(static) < set(second.stdout.splitlines())


def test_json_has_sizes_in_bytes_and_the_exit_code_tells_whether_it_fits(wide):
    shown = run(fit_command, wide, "--json", "--device-memory", "16MiB")
    table = json.loads(shown.stdout)
    assert shown.exit_code == 1
    assert table["problem"] == "the weights do not fit"
    assert table["ranks"][0]["weights"]["total"] > 16 << 20
    assert table["ranks"][0]["memory"]["free"] == 16 << 20


class Ranges(Hub):
    """A hub that answers requests for parts of files, and adds up the bytes of weights it sends."""

    def send(self, status, content, headers, body):
        asked = self.headers.get("Range")
        if status == 200 and asked:
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            whole, content = len(content), content[first : last + 1]
            more = f"bytes {first}-{first + len(content) - 1}/{whole}"
            status, headers = 206, {**headers, "Content-Range": more}
        if ".safetensors" in self.path and body:
            self.server.weights.append(len(content))
        super().send(status, content, headers, body)


@pytest.fixture
def hub(wide, tmp_path, monkeypatch):
    """A hub with one model, behind real HTTP."""
    (tmp_path / "hub" / "someone").mkdir(parents=True)
    (tmp_path / "hub" / "someone" / "some-model").symlink_to(wide)
    handler = type("Own", (Ranges,), {"root": tmp_path / "hub"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.requests, server.weights = [], []
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


def test_a_hub_id_is_read_from_headers_alone(wide, hub, tmp_path):
    """Of weight files only the beginnings are asked for; nothing stays behind."""
    flags = {"download_dir": str(tmp_path / "cache")}
    text, fits = report(EngineConfig.from_keywords(model="someone/some-model", **flags), ())
    assert fits
    assert text.startswith("someone/some-model (LlamaForCausalLM)")
    (sent,) = hub.weights
    assert sent <= 100_001 < (wide / "model.safetensors").stat().st_size
    whole, _ = report(EngineConfig.from_keywords(model=str(wide)), ())
    assert text.splitlines()[1:4] == whole.splitlines()[1:4]
    assert not [*tmp_path.rglob("cache/**/*.safetensors")]


def test_without_a_connection_the_error_says_what_to_do(monkeypatch):
    def fail(*args, **more):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="is not in the local cache and the hub cannot be"):
        report(EngineConfig.from_keywords(model="someone/some-model"), ())
