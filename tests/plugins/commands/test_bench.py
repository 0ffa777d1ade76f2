"""`modulm bench`: prompts, times, figures, and runs against a real socket and a real model."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
import uvicorn
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.media.checkpoint import write_llava

from modulm.testing.adapters import write_lora
from modulm.testing.checkpoints import make_tiny
from modulm_command_bench.command import command
from modulm_command_bench.figures import Timed, compare, figures, parse_goodput
from modulm_command_bench.load import Schedule, Target, arrivals, run
from modulm_command_bench.media_samples import RandomMedia
from modulm_command_bench.plots import frontier, pareto_point
from modulm_command_bench.recorded import RecordedOptions, hub_rows, prompt_of
from modulm_command_bench.samples import Recipe, Sample, make_samples
from modulm_command_bench.sweep import explored
from modulm_tokenizers.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("bench") / "tiny", "Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return load_tokenizer(str(checkpoint))


class Scripted:
    """A server that answers every request with as many tokens as it asks for."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.fail: set[int] = set()
        self.cut: set[int] = set()
        self.running = self.most = 0
        routes = [
            Route("/health", lambda _: Response()),
            Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "scripted"}]})),
            Route("/v1/completions", self.answer, methods=["POST"]),
            Route("/v1/chat/completions", self.answer, methods=["POST"]),
            Route("/v1/rerank", self.whole, methods=["POST"]),
            Route("/v1/embeddings", self.whole, methods=["POST"]),
            Route("/embeddings", self.whole, methods=["POST"]),
            Route("/pooling", self.whole, methods=["POST"]),
            Route("/v1/responses", self.events, methods=["POST"]),
            Route("/v1/audio/transcriptions", self.whole, methods=["POST"]),
            Route("/splits", self.splits),
            Route("/rows", self.rows),
        ]
        self.app = Starlette(routes=routes)

    async def whole(self, request: Request) -> Response:
        if request.headers["content-type"] == "application/json":
            self.bodies.append(await request.json())
        else:
            async with request.form() as form:
                self.bodies.append(dict(form.items()))
                self.bodies[-1]["file"] = await form["file"].read()  # type: ignore[union-attr]
        return JSONResponse({})

    async def events(self, request: Request) -> Response:
        """As `/v1/responses` streams."""
        self.bodies.append(await request.json())
        usage = {"input_tokens": 5, "output_tokens": 2}
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": {"error": None}},
            *[{"type": "response.output_text.delta", "delta": "x"}] * 2,
            {"type": "response.completed", "response": {"usage": usage}},
        ]
        pieces = (f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
        return StreamingResponse(pieces, media_type="text/event-stream")

    async def splits(self, request: Request) -> Response:
        """As the Hub's dataset viewer answers."""
        names = [("main", "train"), ("main", "test"), ("other", "train")]
        return JSONResponse({"splits": [{"config": c, "split": s} for c, s in names]})

    async def rows(self, request: Request) -> Response:
        query = request.query_params
        first, count = int(query["offset"]), int(query["length"])
        numbers = range(first, min(first + count, 150))
        asked = f"{query['config']}/{query['split']}"
        rows = [{"row_idx": n, "row": {"question": f"{asked} {n}"}} for n in numbers]
        return JSONResponse({"rows": rows})

    async def answer(self, request: Request) -> Response:
        number = len(self.bodies)
        body = await request.json()
        self.bodies.append(body)
        if number in self.fail:
            return JSONResponse({"error": {"message": "no"}}, status_code=500)
        return StreamingResponse(self._stream(body, number), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], number: int) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            count = body["max_tokens"]
            for token in range(count):
                await asyncio.sleep(0.001)
                piece = {"delta": {"content": "x"}} if "messages" in body else {"text": "x"}
                yield f"data: {json.dumps({'choices': [piece]})}\n\n"
                if number in self.cut and token == 1:
                    return
            usage = {"prompt_tokens": 5, "completion_tokens": count}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1


@pytest.fixture
def scripted() -> Iterator[tuple[Scripted, str]]:
    made = Scripted()
    server = uvicorn.Server(uvicorn.Config(made.app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        threading.Event().wait(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield made, f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(timeout=300)


# Prompts.


@pytest.mark.parametrize("name", ["random", "sonnet", "prefix_repetition"])
def test_made_prompts_depend_only_on_the_seed(name: str, tokenizer: Any) -> None:
    recipe = Recipe(name=name, count=20, input_len=120, output_len=7, prefix_len=40)
    first = make_samples(recipe, tokenizer)
    assert first == make_samples(recipe, tokenizer)
    assert len(first) == 20
    assert {sample.output_len for sample in first} == {7}
    other = Recipe(name=name, count=20, input_len=120, output_len=7, prefix_len=40, seed=1)
    assert first != make_samples(other, tokenizer)


def test_random_prompts_have_the_length_asked_for_and_no_special_token(tokenizer: Any) -> None:
    recipe = Recipe(count=50, input_len=64, output_len=8, prefix_len=5, range_ratio=0.5)
    samples = make_samples(recipe, tokenizer)
    assert {sample.ids[:5] for sample in samples} == {samples[0].ids[:5]}
    assert all(32 + 5 <= sample.input_len <= 96 + 5 for sample in samples)
    assert all(4 <= sample.output_len <= 12 for sample in samples)
    special = set(tokenizer.backend.all_special_ids)
    assert not any(special & set(sample.ids) for sample in samples)


def test_repeated_prefixes(tokenizer: Any) -> None:
    recipe = Recipe(
        name="prefix_repetition", count=12, prefixes=3, prefix_len=16, input_len=4, output_len=2
    )
    samples = make_samples(recipe, tokenizer)
    assert len({sample.ids[:16] for sample in samples}) == 3
    assert len({sample.ids for sample in samples}) == 12


def test_sonnets_share_their_beginning_and_reach_their_length(tokenizer: Any) -> None:
    recipe = Recipe(name="sonnet", count=5, input_len=400, prefix_len=200)
    samples = make_samples(recipe, tokenizer)
    texts = [sample.text or "" for sample in samples]
    assert len({text[:200] for text in texts}) == 1
    assert len(set(texts)) == 5
    assert all(250 < sample.input_len < 550 for sample in samples)


def test_files(tokenizer: Any, tmp_path: Path) -> None:
    custom = tmp_path / "custom.jsonl"
    custom.write_text('{"prompt": "hello", "output_tokens": 3}\n\n{"prompt": "you"}\n')
    recipe = Recipe(name="custom", path=str(custom), count=2, shuffle=False)
    samples = make_samples(recipe, tokenizer)
    assert [(sample.text, sample.output_len) for sample in samples] == [("hello", 3), ("you", 256)]
    talk = [{"value": "a question of some length, is it not?"}, {"value": "a long answer to it"}]
    short = [{"value": "x"}, {"value": "y"}]
    sharegpt = tmp_path / "sharegpt.json"
    sharegpt.write_text(json.dumps([{"conversations": talk}, {"conversations": short}, {}]))
    recipe = Recipe(name="sharegpt", path=str(sharegpt), count=3)
    samples = make_samples(recipe, tokenizer)
    assert {sample.text for sample in samples} == {talk[0]["value"]}
    assert len(samples) == 3
    assert len(make_samples(Recipe(name="sharegpt", path=str(sharegpt), count=3, oversample=False),
                            tokenizer)) == 1  # fmt: skip
    burst = tmp_path / "burst.csv"
    burst.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "10,m,4,2,6,x\n11.5,m,0,3,3,x\n12,m,6,3,9,x\n"
    )
    samples = make_samples(Recipe(name="burstgpt", path=str(burst), count=2), tokenizer)
    assert [(s.input_len, s.output_len, s.arrival) for s in samples] == [(4, 2, 0.0), (6, 3, 2.0)]


def test_prompts_with_media(tokenizer: Any, tmp_path: Path) -> None:
    media = RandomMedia(items=3, spread=0.5, most=4, buckets={(8, 12, 1): 1.0, (6, 6, 1): 1.0})
    recipe = Recipe(name="random-mm", count=9, input_len=5, media=media)
    samples = make_samples(recipe, tokenizer)
    assert samples == make_samples(recipe, tokenizer)
    counts = {len(sample.media) for sample in samples}
    assert len(counts) > 1
    assert counts <= {1, 2, 3, 4}
    urls = [part["image_url"]["url"] for sample in samples for part in sample.media]
    assert len(set(urls)) == len(urls)
    pictures = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
    assert {(picture.format, picture.size) for picture in pictures} == {
        ("JPEG", (12, 8)), ("JPEG", (6, 6)),
    }  # fmt: skip
    pictures[0].save(tmp_path / "a.png")
    (tmp_path / "b.wav").write_bytes(b"RIFF")
    far = "https://example.org/c.jpg"
    row = {"prompt": "What?", "image_files": ["a.png", far], "audio_files": ["b.wav"]}
    file = tmp_path / "custom.jsonl"
    file.write_text(json.dumps(row))
    (sample,) = make_samples(Recipe(name="custom_mm", path=str(file), count=1), tokenizer)
    one, two, sound = sample.media
    assert one["image_url"]["url"].startswith("data:image/png;base64,")
    assert two == {"type": "image_url", "image_url": {"url": far}}
    assert sound["audio_url"]["url"].startswith("data:audio/")
    body = Target(
        base="", path="/v1/chat/completions", model="m", headers={}, extra={}
    ).body(sample)  # fmt: skip
    assert body["messages"][0]["content"] == [{"type": "text", "text": "What?"}, *sample.media]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("custom_mm", '{"prompt": "a", "image_files": ["missing.png"]}', "cannot read"),
        ("custom_mm", '{"prompt": "a", "image_files": "one.png"}', "image_files: must be a list"),
        ("custom", None, "--dataset-path"),
        ("custom", "{", "line 1"),
        ("custom", '{"text": 1}', "prompt"),
        ("sharegpt", "{", "not valid JSON"),
        ("burstgpt", "a,b\n1,2\n", "BurstGPT"),
        ("custom", "", "no usable prompt"),
    ],
)
def test_bad_files(name: str, text: str | None, words: str, tokenizer: Any, tmp_path: Path) -> None:
    path = None
    if text is not None:
        path = str(tmp_path / "file")
        Path(path).write_text(text)
    with pytest.raises(click.UsageError, match=words):
        make_samples(Recipe(name=name, path=path), tokenizer)


# Times.

SAMPLES = [Sample((1,), 1, arrival=float(i)) for i in range(50)]


@given(
    rate=st.floats(min_value=0.1, max_value=1000),
    burstiness=st.floats(min_value=0.2, max_value=20),
    seed=st.integers(min_value=0, max_value=2**31),
)
def test_arrivals_keep_the_rate(rate: float, burstiness: float, seed: int) -> None:
    times = arrivals(Schedule(rate=rate, burstiness=burstiness, seed=seed), SAMPLES)
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] <= 50 / rate * (1 + 1e-9)


def test_other_schedules() -> None:
    assert arrivals(Schedule(), SAMPLES) == [0.0] * 50
    assert arrivals(Schedule(recorded=True), SAMPLES) == [float(i) for i in range(50)]
    steady = arrivals(Schedule(rate=10, burstiness=1e6), SAMPLES)
    gaps = [after - before for before, after in pairwise(steady)]
    assert max(gaps) - min(gaps) < 0.01
    for kind in ("linear", "exponential"):
        ramp = Schedule(ramp=kind, start_rate=1, end_rate=100, burstiness=1e6)  # type: ignore[arg-type]
        times = arrivals(ramp, SAMPLES)
        assert times[1] - times[0] > 10 * (times[-1] - times[-2])


# Figures.


def test_figures_of_known_times() -> None:
    done = [
        Timed(10, 5, ttft=0.1, latency=0.5, gaps=(0.1, 0.1, 0.1, 0.1)),
        Timed(20, 5, ttft=0.3, latency=1.1, gaps=(0.2, 0.2, 0.2, 0.2)),
        Timed(30, error="no"),
    ]
    limits = parse_goodput(["ttft:200 tpot:150"])
    shown = figures(done, 2.0, percentiles=(50, 100), goodput=limits)
    assert (shown["completed"], shown["failed"]) == (2, 1)
    assert shown["request_throughput"] == 1.0
    assert shown["output_throughput"] == 5.0
    assert shown["total_token_throughput"] == 20.0
    assert shown["request_goodput"] == 0.5
    assert shown["mean_ttft_ms"] == pytest.approx(200)
    assert shown["p100_ttft_ms"] == pytest.approx(300)
    assert shown["mean_tpot_ms"] == pytest.approx(150)
    assert shown["median_itl_ms"] == pytest.approx(150)
    assert shown["mean_e2el_ms"] == pytest.approx(800)


def test_nothing_completed_is_no_crash() -> None:
    shown = figures([Timed(1, error="x")], 1.0)
    assert shown["completed"] == 0
    assert shown["mean_ttft_ms"] == 0


@pytest.mark.parametrize("pair", ["ttft", "ttft:x", "itl:5", "speed:1"])
def test_wrong_goodput(pair: str) -> None:
    with pytest.raises(click.UsageError, match="--goodput"):
        parse_goodput([pair])


def test_compare_shows_ratios() -> None:
    text = compare(
        [{"label": "one", "a": 2.0, "b": 0, "c": "x"}, {"a": 3.0, "b": 1, "c": "y"},
         {"label": "three", "a": 1.0, "b": 0}]
    )  # fmt: skip
    head, first, second = text.splitlines()
    assert head.split() == ["one", "2", "ratio", "three", "ratio"]
    assert first.split() == ["a", "2.00", "3.00", "1.50", "1.00", "0.50"]
    assert second.split() == ["b", "0", "1", "-", "0", "-"]


# Against a socket.


def target(base: str, path: str = "/v1/completions") -> Target:
    return Target(base=base, path=path, model="m", headers={}, extra={})


def test_a_stream_is_timed_and_counted(scripted: tuple[Scripted, str]) -> None:
    server, base = scripted
    samples = [Sample((1, 2, 3), 4), Sample((1,), 1), Sample((1,), 4), Sample((1,), 4)]
    server.fail.add(2)
    server.cut.add(3)
    done, seconds = asyncio.run(run(target(base), samples, [0.0, 0.05, 0.1, 0.15]))
    first, second, failed, cut = done
    assert (first.input_len, first.output_len, first.text) == (5, 4, "xxxx")
    assert len(first.gaps) == 3
    assert 0 < first.ttft <= first.latency <= seconds
    assert first.latency == pytest.approx(first.ttft + sum(first.gaps))
    assert second.gaps == ()
    assert second.tpot is None
    assert failed.error is not None
    assert "500" in failed.error
    assert cut.error == "the stream ended early"
    assert server.bodies[0]["prompt"] == [1, 2, 3]


def test_concurrency_is_bounded(scripted: tuple[Scripted, str]) -> None:
    server, base = scripted
    samples = [Sample((1,), 5)] * 12
    asyncio.run(run(target(base), samples, [0.0] * 12, concurrency=3))
    assert server.most == 3


def test_the_command_saves_what_it_measured(
    scripted: tuple[Scripted, str], checkpoint: Path, tmp_path: Path
) -> None:
    server, base = scripted
    arguments = [
        "serve", "--backend", "openai-chat", "--base-url", base, "--tokenizer", str(checkpoint),
        "--num-prompts", "6", "--random-input-len", "9", "--random-output-len", "4",
        "--max-concurrency", "2", "--num-warmups", "1", "--disable-tqdm", "--ignore-eos",
        "--goodput", "ttft:60000", "--metric-percentiles", "50,90", "--metadata", "who=me",
        "--percentile-metrics", "ttft,e2el", "--extra-body", '{"seed": 1}', "--top-k", "3",
        "--save-result", "--save-detailed", "--result-dir", str(tmp_path),
        "--result-filename", "r.json",
    ]  # fmt: skip
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["completed"] == 6
    assert saved["total_output_tokens"] == 24
    assert saved["request_goodput"] == saved["request_throughput"]
    assert {"p50_ttft_ms", "p90_e2el_ms"} <= set(saved)
    assert "p50_itl_ms" not in saved
    assert saved["output_lens"] == [4] * 6
    assert saved["who"] == "me"
    assert saved["model_id"] == "scripted"
    # One to try, one warm-up, six that count.
    assert len(server.bodies) == 8
    body = server.bodies[-1]
    assert (body["seed"], body["top_k"], body["ignore_eos"]) == (1, 3, True)
    assert isinstance(body["messages"][0]["content"], str)


def test_published_formats(tokenizer: Any, tmp_path: Path) -> None:
    def lines(name: str, *rows: Any) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    def made(name: str, path: str, **more: Any) -> list[Sample]:
        options = {"shuffle": False, "oversample": False, "count": 9, **more}
        return make_samples(Recipe(name=name, path=path, **options), tokenizer)

    questions = lines(
        "question.jsonl", {"category": "math", "turns": ["one", "two"]},
        {"category": "qa", "turns": ["three"]},
    )  # fmt: skip
    assert [s.text for s in made("spec_bench", questions)] == ["one", "three"]
    some = made("spec_bench", questions, recorded=RecordedOptions(category="qa"))
    assert [s.text for s in some] == ["three"]
    with pytest.raises(click.UsageError, match="use one of math, qa"):
        made("spec_bench", questions, recorded=RecordedOptions(category="law"))
    message = {"role": "user", "content": "four"}
    lines("qualitative.jsonl", {"category": "qa", "messages": [message]})
    assert [s.text for s in made("speed_bench", str(tmp_path))] == ["four"]
    trace = lines(
        "trace.jsonl",
        {"timestamp": 1000, "input_length": 10, "output_length": 2, "hash_ids": [7, 8, 9]},
        {"timestamp": 3500, "input_length": 7, "output_length": 3, "hash_ids": [7]},
    )
    first, second = made("timed_trace", trace, recorded=RecordedOptions(chunk=4, seconds=0.001))
    assert (first.input_len, second.input_len, first.output_len, second.output_len) == (10, 7, 2, 3)
    assert first.ids[:4] == second.ids[:4]
    assert first.ids[4:7] != second.ids[4:7]
    assert (first.arrival, second.arrival) == (0.0, 2.5)
    with pytest.raises(click.UsageError, match="line 1.*--timed-trace-label-timestamp"):
        made("timed_trace", questions)
    (tmp_path / "a.png").write_bytes(b"image")
    (tmp_path / "a.wav").write_bytes(b"sound")
    text = {"type": "text", "text": "and"}
    content = [
        {"type": "image", "image": "a.png"},
        text,
        {"type": "image_url", "image_url": "a.png"},
    ]
    (mixed,) = made("custom_image", lines("mixed.jsonl", {"content": content}))
    assert [part["type"] for part in mixed.content] == ["image_url", "text", "image_url"]
    assert mixed.content[0] == mixed.content[2]
    (heard,) = made("custom_audio", lines("heard.jsonl", {"prompt": "p", "audio": "a.wav"}))
    assert base64.b64decode(heard.media[0]["audio_url"]["url"].partition(",")[2]) == b"sound"
    with pytest.raises(click.UsageError, match="neither text nor a file"):
        made("custom_image", lines("bad.jsonl", {"content": [{"type": "table"}]}))
    ranked = made("random-rerank", "", count=5, batch=2, input_len=20)
    assert [len(sample.documents) for sample in ranked] == [2, 2, 2]
    assert len({sample.text for sample in ranked}) == 1


def test_rows_of_the_hub(scripted: tuple[Scripted, str]) -> None:
    rows = hub_rows("a/b", RecordedOptions(), 120, base=scripted[1])
    assert [prompt_of(row) for row in (rows[0], rows[-1])] == ["main/test 0", "main/test 119"]
    rows = hub_rows("a/b", RecordedOptions(hub_subset="other"), 200, base=scripted[1])
    assert (len(rows), rows[0]["question"]) == (150, "other/train 0")
    with pytest.raises(click.UsageError, match="main/train, main/test, other/train"):
        hub_rows("a/b", RecordedOptions(hub_split="dev"), 1, base=scripted[1])
    with pytest.raises(click.UsageError, match="use --dataset-name custom"):
        hub_rows("a/b", RecordedOptions(), 1, base=f"{scripted[1]}/none")


def test_other_apis(scripted: tuple[Scripted, str], checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"sound")
    line = json.dumps({"prompt": "p", "audio": "a.wav"})
    (tmp_path / "sounds.jsonl").write_text(line)
    common = [
        "--base-url", scripted[1], "--tokenizer", str(checkpoint), "--num-prompts", "2",
        "--disable-tqdm",
    ]  # fmt: skip
    sounds = ["--dataset-name", "custom_audio", "--dataset-path", str(tmp_path / "sounds.jsonl")]
    ranks = ["--dataset-name", "random-rerank", "--random-batch-size", "2", "--input-len", "12"]
    for backend, flags in (("openai-audio", sounds), ("vllm-rerank", ranks)):
        result = CliRunner().invoke(command, ["serve", "--backend", backend, *flags, *common])
        assert result.exit_code == 0, result.output
    first, last = scripted[0].bodies[0], scripted[0].bodies[-1]
    assert (first["model"], first["file"], first["prompt"]) == ("scripted", b"sound", "p")
    assert (last["model"], len(last["documents"])) == ("scripted", 2)
    for flags, words in (
        (["--backend", "openai-audio"], "one sound per prompt"),
        (["--backend", "openai", *ranks], "go together"),
    ):
        result = CliRunner().invoke(command, ["serve", *flags, *common])
        assert words in result.output


def test_vectors_and_responses(
    scripted: tuple[Scripted, str], checkpoint: Path, tmp_path: Path
) -> None:
    """The requests that vLLM's client sends for the same backends."""

    def body(backend: str, *flags: str) -> dict[str, Any]:
        saved = tmp_path / "result.json"
        arguments = [
            "serve", "--backend", backend, "--base-url", scripted[1], "--tokenizer",
            str(checkpoint), "--num-prompts", "1", "--random-input-len", "5", "--disable-tqdm",
            "--random-output-len", "2", "--save-result", "--result-filename", str(saved), *flags,
        ]  # fmt: skip
        result = CliRunner().invoke(command, arguments)
        assert result.exit_code == 0, result.output
        assert json.loads(saved.read_text())["completed"] == 1
        return scripted[0].bodies[-1]

    sizes = ["--random-mm-bucket-config", "{(8, 8, 1): 1}"]
    images = ["--dataset-name", "random-mm", *sizes]
    assert len(body("vllm-pooling")["input"]) == 5
    assert isinstance(body("infinity-embeddings")["input"][0], str)
    image = body("infinity-embeddings-clip", *images)
    assert (image["modality"], image["input"][0][:11]) == ("image", "data:image/")
    text = body("openai-embeddings-chat")["messages"][0]
    assert text["role"] == "user"
    kinds = {
        backend: [part["type"] for part in body(backend, *images)["messages"][0]["content"]]
        for backend in (f"openai-embeddings-{name}" for name in ("chat", "clip", "vlm2vec"))
    }
    assert list(kinds.values()) == [["text", "image_url"], ["image_url"], ["image_url", "text"]]
    asked = body("openai-responses")
    assert (asked["max_output_tokens"], asked["stream"]) == (2, True)
    parts = body("openai-responses", *images)["input"][0]["content"]
    assert [part["type"] for part in parts] == ["input_text", "input_image"]


def test_a_sweep_finds_its_loads() -> None:
    """The first two runs are the ends; Little's law says how many requests ran at a time."""

    def values(variable: str, *ends: tuple[float, float]) -> list[dict[str, Any]]:
        runs = explored(variable, 4, 100)
        asked = [next(runs)]
        results = iter([{"request_throughput": r, "mean_e2el_ms": ms} for r, ms in ends])
        with suppress(StopIteration):
            while True:
                asked.append(runs.send(next(results, {})))
        return asked

    assert values("request_rate", (2.5, 400), (12.5, 8000)) == [
        {"max_concurrency": 1}, {"max_concurrency": 100}, {"request_rate": 6.0},
        {"request_rate": 9.0},
    ]  # fmt: skip
    assert values("max_concurrency", (2.5, 400), (12.5, 8000))[2:] == [
        {"max_concurrency": 34}, {"max_concurrency": 67}
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_stages_of_images(tmp_path: Path) -> None:
    folder = write_llava(tmp_path / "llava")
    saved = tmp_path / "stages.json"
    arguments = [
        "mm-processor", "--model", str(folder), "--num-prompts", "2", "--num-warmups", "1",
        "--input-len", "4", "--random-mm-bucket-config", "{(32, 32, 1): 1}", "--max-model-len",
        "128", "--output-json", str(saved), "--disable-tqdm",
    ]  # fmt: skip
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    times = json.loads(saved.read_text())
    assert times["num_prompts"] == 2
    for stage in ("decode_secs", "process_secs", "total_secs"):
        assert 0 < times[f"median_{stage}"] <= times[f"p99_{stage}"]
        assert stage in result.output
    text = make_tiny(tmp_path / "text")
    result = CliRunner().invoke(command, ["mm-processor", "--model", str(text)])
    assert result.exit_code != 0
    assert "takes no images, audio or video" in result.output


def test_a_sweep_goes_on_where_it_ended(
    scripted: tuple[Scripted, str], checkpoint: Path, tmp_path: Path
) -> None:
    def measure(*flags: str) -> list[float]:
        arguments = [
            "sweep", "--base-url", scripted[1], "--tokenizer", str(checkpoint), "--num-prompts",
            "1", "--random-input-len", "5", "--random-output-len", "2", "--disable-tqdm",
            "--output-dir", str(tmp_path / "out"), *flags,
        ]  # fmt: skip
        before = len(scripted[0].bodies)
        result = CliRunner().invoke(command, arguments)
        assert result.exit_code == 0, result.output
        runs.append((len(scripted[0].bodies) - before) // 2)
        lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
        return [json.loads(line)["max_concurrency"] for line in lines]

    runs: list[int] = []
    assert measure("--concurrencies", "1,2") == [1, 2]
    assert measure("--concurrencies", "1,2,3", "--resume") == [1, 2, 3]
    assert measure("--concurrencies", "3") == [3]
    assert runs == [2, 1, 1]


def test_pareto() -> None:
    results = [
        {"max_concurrency": users, "output_throughput": output}
        for users, output in ((1, 50.0), (4, 120.0), (8, 110.0), (16, 400.0))
    ]
    points = [pareto_point(result, 2) for result in results]
    assert points[0] == (50.0, 25.0)
    assert pareto_point({**results[0], "devices": "5"}, 2) == (50.0, 10.0)
    assert frontier(points) == [(25.0, 200.0), (30.0, 60.0), (50.0, 25.0)]
    with pytest.raises(click.UsageError, match="--max-concurrency"):
        pareto_point({"max_concurrency": None, "output_throughput": 5.0}, 1)


@pytest.mark.exhaustive
def test_starts_of_an_engine(checkpoint: Path, tmp_path: Path) -> None:
    saved = tmp_path / "starts.json"
    arguments = [
        "startup", "--model", str(checkpoint), "--num-iters-cold", "1", "--num-iters-warmup", "0",
        "--num-iters-warm", "2", "--output-json", str(saved), "--max-model-len", "64",
    ]  # fmt: skip
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    times = json.loads(saved.read_text())
    assert (len(times["cold_startup_times"]), len(times["warm_startup_times"])) == (1, 2)
    assert all(
        0 < engine < whole
        for whole, engine in zip(
            times["warm_startup_times"], times["warm_engine_times"], strict=True
        )
    )
    result = CliRunner().invoke(command, ["startup", "--model", str(checkpoint), "--dtype", "int3"])
    assert result.exit_code != 0


@pytest.mark.parametrize(
    ("flags", "name", "values"),
    [
        (["--concurrencies", "1,3"], "max_concurrency", [1, 3]),
        (["--request-rates", "200,400.5"], "request_rate", [200.0, 400.5]),
    ],
)
def test_a_sweep_measures_each_load(
    scripted: tuple[Scripted, str],
    checkpoint: Path,
    tmp_path: Path,
    flags: list[str],
    name: str,
    values: list[float],
) -> None:
    arguments = [
        "sweep", *flags, "--base-url", scripted[1], "--tokenizer", str(checkpoint),
        "--num-prompts", "4", "--random-input-len", "5", "--random-output-len", "3",
        "--disable-tqdm", "--output-dir", str(tmp_path / "out"), "--label", "here",
    ]  # fmt: skip
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    assert [saved[name] for saved in results] == values
    assert [saved["completed"] for saved in results] == [4, 4]
    assert [f"{value:g}" for value in values] == [
        line.split()[0] for line in result.stdout.splitlines()[-2:]
    ]
    if find_spec("matplotlib"):
        assert (tmp_path / "out" / "results.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "no plot" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep"], "--concurrencies"),
        (["sweep", "--concurrencies", "1", "--request-rates", "2"], "--concurrencies"),
        (["sweep", "--concurrencies", "1,x"], "--concurrencies 1,x"),
        (["sweep", "--request-rates", "0"], "above 0"),
        (["compare"], "two results"),
        (
            ["serve", "--base-url", "http://127.0.0.1:1", "--ready-check-timeout-sec", "0"],
            "no server",
        ),
        (["serve", "--request-rate", "0"], "--request-rate"),
        (["serve", "--random-mm-bucket-config", "{(8, 8, 16): 1}"], "not supported yet: videos"),
        (["serve", "--random-mm-bucket-config", "8x8"], "--random-mm-bucket-config 8x8: write"),
        (["serve", "--random-mm-limit-mm-per-prompt", "3"], "--random-mm-limit-mm-per-prompt 3"),
        (["serve", "--ramp-up-strategy", "linear"], "--ramp-up-start-rps"),
        (["serve", "--percentile-metrics", "speed"], "--percentile-metrics"),
        (["serve", "--metric-percentiles", "101"], "--metric-percentiles"),
        (["throughput", "--backend", "mii"], "refused"),
        (["throughput", "--lora-path", "x", "--backend", "hf"], "--lora-path cannot be used with"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code != 0
    assert words in result.output


# With a model in this process.


def test_latency_of_a_real_model(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    result = CliRunner().invoke(
        command,
        ["latency", "--model", str(checkpoint), "--batch-size", "2", "--input-len", "4",
         "--output-len", "3", "--num-iters", "2", "--num-iters-warmup", "1",
         "--output-json", str(path), "--kv-cache-memory-bytes", "4M", "--cpu-threads", "1"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    saved = json.loads(path.read_text())
    assert len(saved["latencies"]) == 2
    assert saved["avg_latency"] > 0


def test_throughput_beside_transformers(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "throughput.json"
    result = CliRunner().invoke(
        command,
        ["throughput", "--model", str(checkpoint), "--backend", "modulm", "--backend", "hf",
         "--num-prompts", "4", "--input-len", "6", "--output-len", "5", "--hf-max-batch-size", "2",
         "--random-range-ratio", "0.4", "--output-json", str(path),
         "--kv-cache-memory-bytes", "4M", "--cpu-threads", "1"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    saved = json.loads(path.read_text())
    assert set(saved) == {"modulm", "hf"}
    assert saved["modulm"]["total_num_tokens"] == saved["hf"]["total_num_tokens"]
    assert "of modulm" in result.output


@pytest.mark.parametrize("flags", [[], ["--async-engine", "--disable-frontend-multiprocessing"]])
def test_throughput_of_an_adapter(checkpoint: Path, tmp_path: Path, flags: list[str]) -> None:
    table = json.loads((checkpoint / "config.json").read_text())
    width = table["hidden_size"]
    shape = (width, table["num_attention_heads"] * (table.get("head_dim") or 16))
    adapter = write_lora(tmp_path / "a", {"model.layers.0.self_attn.q_proj": shape}, 4)
    arguments = [
        "throughput", "--model", str(checkpoint), "--num-prompts", "3", "--input-len", "6",
        "--output-len", "4", "--kv-cache-memory-bytes", "4M", "--cpu-threads", "1", "--enable-lora",
        "--lora-path", str(adapter), *flags,
    ]  # fmt: skip
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert "requests/s" in result.output
    (adapter / "adapter_config.json").unlink()
    broken = CliRunner().invoke(command, arguments)
    assert "adapter_config.json" in str(broken.exception)


def test_plots_or_says_what_is_missing(tmp_path: Path) -> None:
    files = []
    for concurrency in (1, 4, 64):
        path = tmp_path / f"{concurrency}.json"
        shown = {"label": "a", "max_concurrency": concurrency, "output_throughput": 5.0}
        times = {"median_ttft_ms": 4.0, "p90_ttft_ms": 5.0, "p99_ttft_ms": 9.0}
        path.write_text(json.dumps({**shown, **times}))
        files.append(str(path))
    picture = tmp_path / "p.png"
    result = CliRunner().invoke(command, ["plot", *files, "-o", str(picture)])
    if not find_spec("matplotlib"):
        assert "pip install 'modulm-command-bench[plot]'" in result.output
        return
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    result = CliRunner().invoke(command, ["plot", "--pareto", *files, "-o", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "4.json").write_text(json.dumps({"label": "a", "output_throughput": 5.0}))
    result = CliRunner().invoke(command, ["plot", *files, "-o", str(picture)])
    assert "share neither" in result.output
