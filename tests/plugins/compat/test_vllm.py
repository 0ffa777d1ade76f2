"""Scripts written for vLLM, run unchanged but for the models' names: what vLLM's documentation and
its examples do (the snippets of its pages on offline inference, LoRA, structured outputs, engines,
arguments), and its commands."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import pkgutil
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import httpx
import openai
import pytest
import torch
from samples import parametrize_sample

from modulm.config.schema.catalog import catalog
from modulm.testing.adapters import write_lora
from modulm.testing.checkpoints import make_tiny
from modulm_vllm.command import main
from modulm_vllm.outputs import with_vllm_names

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[3]
SMALL = {"max_model_len": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 65,
         "disable_log_stats": False}  # fmt: skip
PROMPTS = ["Hello, my name is", "The president of the United States is", "The future of AI is"]


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("models") / "opt-125m", "OPTForCausalLM"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    make_tiny(place / "model")
    sizes = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (64, 32)}
    modules = {f"model.layers.{i}.{name}": size for i in range(2) for name, size in sizes.items()}
    for seed, name in enumerate(("sql", "chat")):
        write_lora(place / name, modules, 8, seed)
    return place


@pytest.fixture(scope="module")
def demo():
    from vllm import LLM

    with LLM(model="demo", **SMALL) as llm:
        yield llm


QUICKSTART = """
from vllm import LLM, SamplingParams

# Define a list of input prompts
prompts = [
    "Hello, my name is",
    "The capital of France is",
    "The largest ocean is",
]

# Define sampling parameters
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

# Initialize the LLM engine with the OPT-125M model
llm = LLM(model="facebook/opt-125m")

# Generate outputs for the input prompts
outputs = llm.generate(prompts, sampling_params)

# Print the generated outputs
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""
FP8_CACHE = """
from vllm import LLM, SamplingParams

# Sample prompts.
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
# Create a sampling params object.
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

# Create an LLM.
llm = LLM(model="facebook/opt-125m", kv_cache_dtype="fp8")
# Generate texts from the prompts. The output is a list of RequestOutput objects
# that contain the prompt, generated text, and other information.
outputs = llm.generate(prompts, sampling_params)
# Print the outputs.
print("\\nGenerated Outputs:\\n" + "-" * 60)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt:    {prompt!r}")
    print(f"Output:    {generated_text!r}")
    print("-" * 60)
"""


@pytest.mark.parametrize(("script", "lines"), [(QUICKSTART, 3), (FP8_CACHE, 4)])
def test_scripts_of_the_documentation(script: str, lines: int, opt: str) -> None:
    """Of the pages "Architecture Overview" and "AMD Quark" (its checkpoint apart)."""
    said, names = io.StringIO(), {}
    with contextlib.redirect_stdout(said):
        exec(script.replace("facebook/opt-125m", opt), names)
    names["llm"].shutdown()
    assert said.getvalue().count("Prompt:") == lines
    assert all(len(o.outputs[0].token_ids) == 16 for o in names["outputs"])


def test_names_of_the_package() -> None:
    import vllm
    from vllm.entrypoints.llm import LLM
    from vllm.version import __version__

    assert vllm.__version__ == __version__ == f"0.13.0+modulm.{version('modulm')}"
    assert vllm.__version_tuple__[:3] == (0, 13, 0)
    assert vllm.LLM is LLM
    assert {"LLM", "SamplingParams", "AsyncLLMEngine"} <= set(dir(vllm))


def every_name() -> list[tuple[str, str]]:
    from modulm_vllm.modules import MODULES

    return [(module, name) for module, names in MODULES.items() for name in names]


def test_every_name_is_there() -> None:
    for module, name in every_name():
        scope: dict[str, object] = {}
        exec(f"import {module}\nfrom {module} import {name} as found", scope)
        assert scope["found"] is not None


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("from vllm import ModelRegistry", ImportError, "modulm.register"),
        ("import vllm.model_executor.models.llama", ImportError, "modulm_layers"),
        ("from vllm.distributed import get_tp_group", ImportError, "tensor_parallel_size"),
        ("from vllm.entrypoints.openai.api_server import run_server", ImportError, "vllm serve"),
        ("from vllm.v1.sample.logits_processor import AdapterLogitsProcessor", ImportError,
         "plugins-logits-processor.md"),
        ("import vllm; vllm.Nonsense", AttributeError, "docs/vllm-scripts.md"),
        ("from vllm import SamplingParams; SamplingParams(temperature=-1)", ValueError,
         "temperature must be"),
        ("from vllm import LLM; LLM('demo', data_parallel_size=8)", ValueError,
         "data_parallel_size: LLM runs one replica"),
        ("from vllm import LLM; LLM('demo', max_model_length=8)", ValueError, "max_model_len"),
        ("from vllm import EngineArgs; EngineArgs(max_model_length=8)", TypeError, "max_model_len"),
        ("from vllm.sampling_params import StructuredOutputsParams as S; S(json={}, regex='a')",
         ValueError, "exactly one"),
        ("from vllm.lora.request import LoRARequest; LoRARequest('a', 0, 'x')", ValueError,
         "lora_int_id"),
    ],
)  # fmt: skip
def test_what_is_not_there_says_what_is(code: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words.replace("(", r"\(")):
        exec(code, {})


def test_replacements_exist() -> None:
    """Pages, flags and names that the messages point to are there, and vLLM's names are not."""
    from modulm_vllm.elsewhere import INSTEAD
    from modulm_vllm.modules import MODULES

    known = {*catalog().specs, *catalog().tables}
    for name, text in INSTEAD.items():
        text = text.replace("`modulm.executors`", "")  # a group of entry points
        assert name not in {
            f"{module}.{each}" for module, names in MODULES.items() for each in names
        }
        for page in re.findall(r"docs/[\w-]+\.md", text):
            assert (ROOT / page).is_file(), page
        for flag in re.findall(r"--([a-z][a-z-]+)", text):
            assert flag == "model" or flag.replace("-", "_") in known, flag
        for path in re.findall(r"\bmodulm(?:_\w+)?(?:\.\w+)+", text):
            assert pkgutil.resolve_name(path) is not None, path
        assert "not supported yet" not in text


def test_a_name_that_is_not_there_can_be_asked_for() -> None:
    import vllm

    assert not hasattr(vllm, "ModelRegistry")


def test_parameters_can_be_changed(demo) -> None:
    from vllm import SamplingParams

    params = demo.get_default_sampling_params()
    params.temperature, params.max_tokens = 0.0, 4
    params.stop_token_ids.append(0)
    copy = params.clone()
    copy.max_tokens = 2
    long, short = demo.generate(["One", "One"], [params, copy], use_tqdm=False)
    assert len(long.outputs[0].token_ids) == 4
    assert long.outputs[0].token_ids[:2] == short.outputs[0].token_ids
    params.temperature = -2
    with pytest.raises(ValueError, match="temperature"):
        demo.generate("One", params, use_tqdm=False)
    assert SamplingParams(stop="a").stop == ["a"]


def test_prompts_of_each_form(demo) -> None:
    from vllm import SamplingParams, TextPrompt, TokensPrompt

    tokenizer = demo.get_tokenizer()
    greedy = SamplingParams(temperature=0, max_tokens=6)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    given = [text, TextPrompt(prompt=text), TokensPrompt(prompt_token_ids=ids)]
    outputs = demo.generate(given, greedy, use_tqdm=False)
    outputs += demo.generate(prompt_token_ids=[ids], sampling_params=greedy, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert tokenizer.decode(outputs[0].outputs[0].token_ids, skip_special_tokens=True) == (
        outputs[0].outputs[0].text
    )


def test_conversations(demo) -> None:
    """The example of `LLM.chat`: one, several, thoughts left in the text as vLLM leaves them."""
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
    ]
    params = demo.get_default_sampling_params()
    params.max_tokens = 12
    (one,) = demo.chat(conversation, params, False)
    both = demo.chat([conversation] * 2, sampling_params=params, use_tqdm=False)
    assert len(both) == 2
    assert one.outputs[0].text.startswith("<think>")
    assert one.outputs[0].reasoning is None


@parametrize_sample("name", ["structured_outputs", "guided_decoding"], every=2)
def test_structured_outputs(demo, name: str) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import GuidedDecodingParams, StructuredOutputsParams

    kind = StructuredOutputsParams if name == "structured_outputs" else GuidedDecodingParams
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    held = [
        kind(choice=["Positive", "Negative"]),
        kind(regex=r"\w{1,8}@\w{1,8}\.com"),
        kind(json=schema),
    ]
    params = [SamplingParams(temperature=0, max_tokens=40, **{name: one}) for one in held]
    choice, regex, text = (
        o.outputs[0].text for o in demo.generate(["Is it fine?"] * 3, params, use_tqdm=False)
    )
    assert choice in ("Positive", "Negative")
    assert regex.endswith(".com")
    assert text.startswith("{")


def test_beams(demo) -> None:
    from vllm.sampling_params import BeamSearchParams

    (output,) = demo.beam_search(
        [{"prompt": "One two"}], BeamSearchParams(beam_width=3, max_tokens=4)
    )
    assert len(output.sequences) == 3
    assert all(sequence.text.startswith("One two") for sequence in output.sequences)
    assert demo.generate("One", use_tqdm=False)[0].finished


def test_statistics(demo) -> None:
    """vLLM's example of metrics: counters, gauges, histograms by vLLM's names."""
    from vllm.v1.metrics.reader import Counter, Gauge, Histogram

    before = {m.name: m for m in demo.get_metrics()}
    demo.generate(PROMPTS, use_tqdm=False)
    after = {m.name: m for m in demo.get_metrics()}
    name = "vllm:generation_tokens"
    assert isinstance(after[name], Counter)
    assert after[name].value > before[name].value
    assert isinstance(after["vllm:num_requests_running"], Gauge)
    waited = after["vllm:request_queue_time_seconds"]
    assert isinstance(waited, Histogram)
    assert waited.count == waited.buckets["+Inf"] >= 3


def test_outputs_have_vllms_attributes(demo) -> None:
    from vllm import CompletionOutput, RequestOutput
    from vllm.outputs import CompletionOutput as OfOutputs

    (output,) = demo.generate("One", use_tqdm=False)
    (choice,) = output.outputs
    assert isinstance(output, RequestOutput)
    assert isinstance(choice, CompletionOutput)
    assert OfOutputs is CompletionOutput
    assert choice.routed_experts is None
    experts = torch.zeros(3, 2, 2).numpy()
    assert with_vllm_names(output).outputs[0] == choice
    output.outputs[0].arrays = {"routed_experts": experts}
    assert with_vllm_names(output).outputs[0].routed_experts is experts


def test_calls_into_workers(demo) -> None:
    assert demo.collective_rpc(lambda worker, by: worker.rank + by, args=(2,)) == [2]
    with pytest.raises(ValueError, match="nothing"):
        demo.collective_rpc("nothing")
    assert demo.apply_model(lambda model: type(model).__name__) == ["Qwen3ForCausalLM"]


def test_adapters(llama: Path) -> None:
    """The example of multi-LoRA inference."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
    chat = LoRARequest(lora_name="chat", lora_int_id=2, lora_path=str(llama / "chat"))
    adapters = [None, LoRARequest("sql", 1, str(llama / "sql")), chat]
    with LLM(str(llama / "model"), enable_lora=True, max_loras=2, max_lora_rank=8, max_cpu_loras=2,
             dtype="float32", **SMALL) as llm:  # fmt: skip
        outputs = llm.generate(["A robot may not injure"] * 3, params, lora_request=adapters)
    assert len({output.outputs[0].cumulative_logprob for output in outputs}) == 3


def test_pooling(tmp_path: Path) -> None:
    """The examples of embed, classify, score and encode; data are tensors."""
    from vllm import LLM, PoolingParams

    folder = make_tiny(tmp_path / "bert", "BertModel")
    with LLM(model=str(folder), task="embed", enforce_eager=True) as llm:
        first, second = llm.embed(PROMPTS[:2], use_tqdm=False)
        (pooled,) = llm.encode(
            PROMPTS[0], PoolingParams(normalize=True), pooling_task="embed", use_tqdm=False
        )
        (score,) = llm.score(PROMPTS[0], PROMPTS[0], use_tqdm=False)
    assert len(first.outputs.embedding) == len(second.outputs.embedding)
    assert isinstance(pooled.outputs.data, torch.Tensor)
    assert pooled.outputs.data.norm().item() == pytest.approx(1, abs=1e-3)
    assert score.outputs.score == pytest.approx(1, abs=1e-3)


def test_an_engine_stepped_by_hand(opt: str) -> None:
    """The example "LLM Engine", with its parser of arguments."""
    from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
    from vllm.utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(description="Demo on using the LLMEngine class directly")
    parser = EngineArgs.add_cli_args(parser)
    args = parser.parse_args(["--model", opt, "--max_model_len", "128", "--max-num-seqs=8"])
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    waiting = [
        ("A robot may not injure a human being",
         SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95)),
    ]  # fmt: skip
    number, finished, seen = 0, {}, 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params = waiting.pop(0)
            engine.add_request(str(number), prompt, params)
            number += 1
        outputs: list[RequestOutput] = engine.step()
        seen += len(outputs)
        finished |= {output.request_id: output for output in outputs if output.finished}
    assert sorted(finished) == ["0", "1", "2"]
    assert seen > 3
    assert len(finished["2"].outputs) == 2
    assert finished["0"].prompt_logprobs[1] is not None
    engine.add_request("gone", "One", SamplingParams(max_tokens=100))
    engine.abort_request("gone")
    assert not engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="context"):
        engine.add_request("long", "x " * 500, SamplingParams())
    engine.shutdown()


def test_an_engine_on_an_event_loop(llama: Path) -> None:
    """The example "Async LLM Streaming", with an adapter and a tokenizer that is awaited."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm import AsyncLLMEngine  # isort: skip

    assert AsyncLLM is AsyncLLMEngine
    arguments = AsyncEngineArgs(
        model=str(llama / "model"), enforce_eager=True, enable_lora=True, max_lora_rank=8,
        max_model_len=128, disable_frontend_multiprocessing=True, num_gpu_blocks_override=65,
    )  # fmt: skip

    async def run() -> None:
        from vllm.lora.request import LoRARequest

        engine = AsyncLLM.from_engine_args(arguments)
        try:
            params = SamplingParams(
                max_tokens=20, temperature=0, seed=42, output_kind=RequestOutputKind.DELTA,
                ignore_eos=True,
            )  # fmt: skip
            parts: list[int] = []
            async for output in engine.generate("The future", params, request_id="a"):
                parts += [token for one in output.outputs for token in one.token_ids]
                if output.finished:
                    break
            assert len(parts) == 20
            lora = LoRARequest("sql", 1, str(llama / "sql"))
            for number in range(2):
                found = [o async for o in engine.generate("The", params, f"b{number}",
                                                          lora_request=lora)]  # fmt: skip
                assert found[-1].finished
            assert await engine.list_loras() == {1}
            assert await engine.remove_lora(1)
            awaited, plain = await engine.get_tokenizer(), engine.get_tokenizer()
            assert awaited.encode("One") == plain.encode("One")
            assert (await engine.get_model_config()).max_model_len == 128
            with pytest.raises(ValueError, match="context"):
                async for _ in engine.generate("x " * 500, params, request_id="long"):
                    pass
            await engine.check_health()
            await engine.pause_generation(mode="wait")
            assert await engine.is_paused()
            await engine.resume_generation()
            assert not await engine.is_paused()
            assert "generate" in await engine.get_supported_tasks()
            await engine.reset_mm_cache()
            await engine.wait_for_requests_to_drain(5)
            with pytest.raises(ValueError, match="weight-transfer-config"):
                await engine.init_weight_transfer_engine({"init_info": {}})
        finally:
            engine.shutdown()

    asyncio.run(run())


def test_arguments_of_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's examples do: their own options beside the engine's, then `LLM(**args)`."""
    from vllm import LLM, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    file = tmp_path / "settings.yaml"
    file.write_text("max-num-seqs: 3\ntop-k: 9\nenforce-eager: true\n")
    parser = FlexibleArgumentParser()
    engine_group = parser.add_argument_group("Engine arguments")
    EngineArgs.add_cli_args(engine_group)
    engine_group.set_defaults(model="demo")
    sampling_group = parser.add_argument_group("Sampling parameters")
    sampling_group.add_argument("--max-tokens", type=int)
    sampling_group.add_argument("--top_k", type=int)
    args = vars(parser.parse_args([
        "--max_model_len", "96", "--config", str(file), "--max_num_seqs=4", "--max_tokens", "5",
        "--no-enable-prefix-caching", "--structured-outputs-config.backend", "xgrammar",
    ]))  # fmt: skip
    assert (args.pop("max_tokens"), args.pop("top_k")) == (5, 9)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.01")
    with LLM(**args) as llm:
        config = llm.info.config
        assert config.scheduler.max_num_seqs == 4
        assert config.cache.enable_prefix_caching is False
        assert config.cache.kv_cache_memory_bytes == int(0.01 * 2**30)
        assert llm.llm_engine.model_config.max_model_len == 96
    table = dataclasses.asdict(EngineArgs(model="demo", max_model_len=64))
    assert EngineArgs(**table).create_engine_config().model.max_model_len == 64


def test_named_logprobs_and_repetitions(demo) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams

    params = SamplingParams(temperature=0, max_tokens=3, logprob_token_ids=[5, 9])
    answer = demo.generate(PROMPTS[0], params)[0].outputs[0]
    for token, position in zip(answer.token_ids, answer.logprobs, strict=True):
        assert list(position) == list(dict.fromkeys([token, 5, 9]))
        assert position[9].rank is None
    repeated = SamplingParams(
        temperature=0, max_tokens=64, ignore_eos=True, min_tokens=9, logit_bias={7: 100},
        repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_count=3),
    )  # fmt: skip
    answer = demo.generate(PROMPTS[0], repeated)[0].outputs[0]
    assert answer.token_ids == [7] * 9
    assert (answer.finish_reason, answer.stop_reason) == ("repetition", "repetition_detected")


# Commands.


def run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """A command of `vllm` in this process: its code and what it said."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capfd.readouterr()
    return int(ended.value.code or 0), told.out + told.err


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`python -m vllm.entrypoints.openai.api_server`, with vLLM's variable for a key."""
    log = tmp_path_factory.mktemp("server") / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "demo",
             "--port", str(port), "--max-model-len", "256", "--served-model-name", "small",
             "--swap-space", "4"],
            stdout=sink, stderr=sink, env={**os.environ, "VLLM_API_KEY": "token-abc123"},
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(300)


def test_the_server_answers_openais_client(server: str) -> None:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="token-abc123") as client:
        answer = client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "Hello!"}], max_tokens=8
        )
    assert answer.usage.completion_tokens > 0
    assert httpx.get(f"{server}/v1/models").status_code == 401
    metrics = httpx.get(f"{server}/metrics").text
    assert "vllm:request_success_total{" in metrics
    assert "modulm:request_success_total{" in metrics


def test_fields_of_vllm(server: str) -> None:
    """`logprob_token_ids` and `repetition_detection`, in whole answers and streams."""
    with openai.OpenAI(base_url=f"{server}/v1", api_key="token-abc123") as client:
        question = {"model": "small", "messages": [{"role": "user", "content": "Hello!"}]}
        repeat = {"logit_bias": {"70": 100}, "max_tokens": 64, "extra_body": {
            "repetition_detection": {"max_pattern_size": 1, "min_count": 4}}}  # fmt: skip
        answer = client.chat.completions.create(
            **question, max_tokens=1, extra_body={"logprob_token_ids": [70, 71]}
        )
        position = answer.choices[0].logprobs.content[0]
        assert len(position.top_logprobs) == 2
        assert all(each.logprob < 0 for each in position.top_logprobs)
        assert client.chat.completions.create(**question, **repeat).choices[0].finish_reason == (
            "repetition"
        )
        *_, last = client.chat.completions.create(**question, **repeat, stream=True)
        assert last.choices[0].finish_reason == "repetition"
        completion = client.completions.create(
            model="small", prompt="Hello", max_tokens=1, extra_body={"logprob_token_ids": [70, 71]}
        )
        assert len(completion.choices[0].logprobs.top_logprobs[0]) in (2, 3)
        with pytest.raises(openai.BadRequestError, match="repetition_detection needs a min_count"):
            client.chat.completions.create(
                **question, extra_body={"repetition_detection": {"max_pattern_size": 2}}
            )


def test_chat_and_complete(server: str, capfd: pytest.CaptureFixture[str]) -> None:
    common = ("--url", f"{server}/v1", "--api-key", "token-abc123", "--model-name", "small")
    code, said = run(capfd, "chat", *common, "--system-prompt", "Be short.", "-q", "Hello")
    assert code == 0, said
    assert said.strip()
    code, said = run(capfd, "complete", *common, "--quick", "One two")
    assert code == 0, said


def test_the_command_itself() -> None:
    """The installed script, once: its help names the commands that vLLM's documentation names."""
    done = subprocess.run([BIN / "vllm", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: vllm")
    for name in ("chat", "complete", "serve", "bench", "collect-env", "run-batch"):
        assert f"  {name} " in done.stdout


def test_version_and_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(capfd, "--version") == (0, f"0.13.0+modulm.{version('modulm')}\n")
    for words in (("serve",), ("chat",), ("complete",), ("bench",), ("bench", "latency"),
                  ("bench", "throughput"), ("bench", "serve"), ("run-batch",)):  # fmt: skip
        code, said = run(capfd, *words, "--help")
        assert code == 0
        assert said.startswith(f"Usage: vllm {' '.join(words)} ")


def test_a_wrong_flag_is_told_under_the_commands_name(capfd: pytest.CaptureFixture[str]) -> None:
    code, said = run(capfd, "serve", "demo", "--max-model-lenght", "4096")
    assert code == 2
    assert "vllm serve" in said
    assert "--max-model-len" in said


def test_the_command_of_the_docs_that_cannot_run_says_why(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`vllm serve <model> --collect-detailed-traces all`."""
    code, said = run(capfd, "serve", str(tmp_path), "--collect-detailed-traces", "all")
    assert code == 2
    assert "not supported yet" in said


def test_collect_env(capfd: pytest.CaptureFixture[str]) -> None:
    code, said = run(capfd, "collect-env")
    assert code == 0
    assert "torch" in said


def test_run_batch(capfd: pytest.CaptureFixture[str], tmp_path: Path, opt: str) -> None:
    body = {"model": opt, "prompt": "One", "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    code, said = run(capfd, "run-batch", "-i", str(tmp_path / "in.jsonl"), "-o",
                     str(tmp_path / "out.jsonl"), "--model", opt)  # fmt: skip
    assert code == 0, said
    assert json.loads((tmp_path / "out.jsonl").read_text())["response"]["status_code"] == 200


def test_bench(capfd: pytest.CaptureFixture[str], tmp_path: Path, opt: str) -> None:
    """`vllm bench latency`, with options of the documentation's list."""
    out = tmp_path / "latency.json"
    code, said = run(
        capfd, "bench", "latency", "--model", opt, "--input-len", "8", "--output-len", "4",
        "--batch-size", "2", "--num-iters", "1", "--num-iters-warmup", "1", "--output-json",
        str(out), "--disable-detokenize",
    )  # fmt: skip
    assert code == 0, said
    assert json.loads(out.read_text())["avg_latency"] > 0


# Where vLLM is installed.


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment with a distribution `vllm` of somebody else's, its command included."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text('__version__ = "9.9"\ndef run(): print("theirs")\n')
    info = tmp_path / "vllm-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nvllm = vllm:run\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def ask(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_vllm_itself_comes_first(installed: dict[str, str]) -> None:
    code = "import vllm; print(vllm.__version__); import vllm.sampling_params"
    done = ask(code, installed)
    assert done.stdout == "9.9\n"
    assert done.stderr.rstrip().endswith("No module named 'vllm.sampling_params'")
    done = subprocess.run(
        [BIN / "vllm", "serve"], capture_output=True, text=True, check=False, env=installed
    )
    assert done.stdout == "theirs\n"


@pytest.mark.exhaustive
def test_an_installed_vllm_that_cannot_be_imported_is_not_replaced(
    installed: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "vllm/__init__.py").unlink()
    (tmp_path / "vllm").rmdir()
    done = ask("import vllm", installed)
    assert done.stderr.rstrip().endswith("ModuleNotFoundError: No module named 'vllm'")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_from_a_wheel(tmp_path: Path) -> None:
    """Plain files and a .pth: nothing under the name vllm, which an install of vLLM could meet."""
    root = Path(__file__).resolve().parents[3]
    uv = BIN / "uv"
    folder = root / "plugins/compat/vllm"
    subprocess.run([uv, "build", "--wheel", "-q", "--offline", "-o", tmp_path, folder], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    subprocess.run([uv, "pip", "install", "-q", "--no-deps", "--offline", "--python", python,
                    wheel], check=True)  # fmt: skip
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    assert sorted(path.name for path in packages.iterdir() if "vllm" in path.name) == [
        "_modulm_vllm_names.py", "modulm_vllm", "modulm_vllm-0.1.0.dist-info",
        "modulm_vllm_names.pth",
    ]  # fmt: skip
    code = "import importlib.util as u; print(u.find_spec('vllm').origin)"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(packages / "modulm_vllm/modules.py")
