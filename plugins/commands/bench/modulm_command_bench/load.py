"""Sends requests to a server on a schedule, and times every piece of the responses."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from time import perf_counter
from typing import Any, Literal

import httpx
import numpy as np
from attrs import evolve, frozen

from modulm_command_bench.figures import Timed
from modulm_command_bench.samples import Sample

__all__ = ["BACKENDS", "Schedule", "Target", "arrivals", "run"]

#: Name of a backend -> path of its API.
BACKENDS = {
    "vllm": "/v1/completions",
    "modulm": "/v1/completions",
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
    "openai-embeddings": "/v1/embeddings",
    "openai-embeddings-chat": "/v1/embeddings",
    "openai-embeddings-clip": "/v1/embeddings",
    "openai-embeddings-vlm2vec": "/v1/embeddings",
    "infinity-embeddings": "/embeddings",
    "infinity-embeddings-clip": "/embeddings",
    "openai-audio": "/v1/audio/transcriptions",
    "vllm-pooling": "/pooling",
    "vllm-rerank": "/v1/rerank",
}
#: Ends of paths whose responses are read as a whole.
_WHOLE = ("/embeddings", "/pooling", "/rerank", "/transcriptions")
#: Ends of backends' names that embed messages, which may have media.
_CHATTED = ("-chat", "-clip", "-vlm2vec")

#: Events of `/v1/responses` that end a stream.
_LAST_EVENTS = ("response.completed", "response.incomplete")
#: Connections time out, responses do not.
_TIMEOUT = httpx.Timeout(None, connect=60.0)


@frozen(kw_only=True)
class Target:
    """The server, and the common parts of all requests."""

    base: str
    path: str
    model: str
    headers: Mapping[str, str]
    extra: Mapping[str, Any]
    ignore_eos: bool = False
    backend: str = "openai"

    @property
    def takes_messages(self) -> bool:
        """Whether prompts are sent as messages, so that they need text and may have media."""
        if self.path.endswith("/embeddings"):
            return self.backend.endswith(_CHATTED)
        return self.path.endswith(("/chat/completions", "/responses"))

    def body(self, sample: Sample) -> dict[str, Any]:
        """Build the request for a sample."""
        body: dict[str, Any] = {"model": sample.model or self.model}
        if self.path.endswith(("/embeddings", "/pooling")):
            return {**body, **self._embedded(sample), **self.extra}
        if self.path.endswith("/rerank"):
            return {**body, "query": sample.text, "documents": sample.documents, **self.extra}
        body |= {"stream": True, "temperature": 0.0}
        if self.path.endswith("/responses"):
            body |= {"max_output_tokens": sample.output_len, "input": _responses_input(sample)}
            return {**body, **({"ignore_eos": True} if self.ignore_eos else {}), **self.extra}
        body |= {"max_tokens": sample.output_len, "stream_options": {"include_usage": True}}
        if self.path.endswith("/chat/completions"):
            body["messages"] = [{"role": "user", "content": _content(sample)}]
        else:
            body["prompt"] = sample.text or list(sample.ids)
        if self.ignore_eos:
            body["ignore_eos"] = True
        return {**body, **self.extra}

    def _embedded(self, sample: Sample) -> dict[str, Any]:
        """The fields of a request for vectors with the prompt."""
        if self.backend.startswith("infinity"):
            parts = [part for part in sample.media if "image_url" in part]
            if parts and self.backend.endswith("-clip"):
                return {"input": [parts[0]["image_url"]["url"]], "modality": "image"}
            return {"input": [sample.text], "modality": "text"}
        if not self.takes_messages:
            return {"input": sample.text or list(sample.ids)}
        text: str | None = sample.text
        if sample.media and self.backend.endswith("-clip"):
            text = None  # one tower embeds either images or text
        elif sample.media and self.backend.endswith("-vlm2vec"):
            text = "Represent the given image."
        content: Any = _content(evolve(sample, text=text))
        if self.backend.endswith("-vlm2vec") and isinstance(content, list):
            content = sorted(content, key=lambda part: part["type"] == "text")
        return {"messages": [{"role": "user", "content": content}]}


@frozen(kw_only=True)
class Schedule:
    """When requests are sent. `rate`: per second; infinite means all at once.

    `burstiness`: shape of the gamma distribution of intervals; 1 is a Poisson process, less is
    burstier. `ramp`: the rate changes over the run. `recorded`: use the samples' own times.
    """

    rate: float = float("inf")
    burstiness: float = 1.0
    ramp: Literal["linear", "exponential"] | None = None
    start_rate: float = 1.0
    end_rate: float = 1.0
    recorded: bool = False
    seed: int = 0


def arrivals(schedule: Schedule, samples: Sequence[Sample]) -> list[float]:
    """Compute the times at which requests are sent, in seconds from 0."""
    if schedule.recorded and all(sample.arrival is not None for sample in samples):
        return sorted(float(sample.arrival or 0) for sample in samples)
    count = len(samples)
    if schedule.ramp is None and schedule.rate == float("inf"):
        return [0.0] * count
    rng = np.random.default_rng(schedule.seed % 2**64)
    rates = np.array([_rate(schedule, index / max(1, count - 1)) for index in range(count)])
    gaps = rng.gamma(schedule.burstiness, 1.0 / (rates * schedule.burstiness))
    times: list[float] = np.cumsum(gaps).tolist()
    if schedule.ramp is None:
        # Scaled so that a run lasts count / rate seconds.
        times = [time * count / schedule.rate / times[-1] for time in times]
    return [time - times[0] for time in times]


def _rate(schedule: Schedule, progress: float) -> float:
    if schedule.ramp is None:
        return schedule.rate
    low, high = schedule.start_rate, schedule.end_rate
    if schedule.ramp == "linear":
        return low + (high - low) * progress
    return float(low * (high / low) ** progress)


async def run(
    target: Target,
    samples: Sequence[Sample],
    times: Sequence[float],
    *,
    concurrency: int | None = None,
    finished: Callable[[Timed], object] = lambda timed: None,
) -> tuple[list[Timed], float]:
    """Send all requests; returns (timed requests in order, total seconds)."""
    gate = asyncio.Semaphore(concurrency) if concurrency else None
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=target.base, headers=dict(target.headers), limits=limits, timeout=_TIMEOUT
    ) as client:
        start = perf_counter()

        async def one(sample: Sample, at: float) -> Timed:
            await asyncio.sleep(max(0.0, start + at - perf_counter()))
            async with gate or nullcontext():
                timed = await _send(client, target, sample)
            finished(timed)
            return timed

        jobs = [one(sample, at) for sample, at in zip(samples, times, strict=True)]
        done = await asyncio.gather(*jobs)
        return list(done), perf_counter() - start


def _content(sample: Sample) -> Any:
    """The content of a chat message: a text, or parts if there are media."""
    text = [] if sample.text is None else [{"type": "text", "text": sample.text}]
    return list(sample.content) or ([*text, *sample.media] if sample.media else sample.text)


def _responses_input(sample: Sample) -> Any:
    """The content of a message for `/v1/responses`, whose parts have other names."""
    content = _content(sample)
    if isinstance(content, str):
        return content
    parts = [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"]}
        for part in content
    ]
    return [{"role": "user", "content": parts}]


def _form(target: Target, sample: Sample) -> dict[str, Any]:
    """Build the form of a transcription: the sample's sound as a file, and the model."""
    (url,) = [part["audio_url"]["url"] for part in sample.media if "audio_url" in part]
    head, _, data = url.partition(",")
    kind = head.removeprefix("data:").partition(";")[0]
    fields = {"model": sample.model or target.model, "prompt": sample.text or "", **target.extra}
    return {"data": fields, "files": {"file": ("sound", base64.b64decode(data), kind)}}


async def _send(client: httpx.AsyncClient, target: Target, sample: Sample) -> Timed:
    """Send one request. A failure is part of the result."""
    start = perf_counter()
    try:
        content: dict[str, Any] = {"json": target.body(sample)}
        if target.path.endswith("/transcriptions"):
            content = _form(target, sample)
        async with client.stream("POST", target.path, **content) as answer:
            if answer.is_error:
                text = (await answer.aread()).decode("utf-8", errors="replace")
                return Timed(sample.input_len, error=f"{answer.status_code}: {text[:200]}")
            if target.path.endswith(_WHOLE):
                await answer.aread()
                seconds = perf_counter() - start
                return Timed(sample.input_len, ttft=seconds, latency=seconds)
            return await _listen(answer.aiter_lines(), start, sample)
    except (httpx.HTTPError, ValueError) as error:
        return Timed(sample.input_len, error=f"{type(error).__name__}: {error}")


async def _listen(lines: AsyncIterator[str], start: float, sample: Sample) -> Timed:
    """Time the pieces of a stream until it ends."""
    marks: list[float] = []
    texts: list[str] = []
    usage: dict[str, Any] = {}
    whole = False
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            whole = True
            break
        chunk = json.loads(data)
        if chunk.get("error"):
            return Timed(sample.input_len, error=str(chunk["error"])[:200])
        usage = chunk.get("usage") or usage
        if chunk.get("type") in _LAST_EVENTS:
            stated = chunk["response"].get("usage") or {}
            usage = {"prompt_tokens": stated.get("input_tokens", sample.input_len),
                     "completion_tokens": stated.get("output_tokens", len(marks))}  # fmt: skip
            whole = True
            break
        text = _text(chunk)
        if text is not None:
            marks.append(perf_counter())
            texts.append(text)
    if not whole:
        return Timed(sample.input_len, error="the stream ended early")
    end = marks[-1] if marks else perf_counter()
    return Timed(
        input_len=usage.get("prompt_tokens", sample.input_len),
        output_len=usage.get("completion_tokens", len(marks)),
        ttft=(marks[0] if marks else end) - start,
        latency=end - start,
        gaps=tuple(after - before for before, after in pairwise(marks)),
        text="".join(texts),
    )


def _text(chunk: Mapping[str, Any]) -> str | None:
    """The text of a chunk; None for one without text (role, usage)."""
    if str(chunk.get("type", "")).endswith(".delta"):
        return str(chunk.get("delta") or "")
    for choice in chunk.get("choices", ()):
        if "delta" not in choice:
            return str(choice.get("text") or "")
        delta = choice["delta"]
        text = delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content")
        if text or delta.get("tool_calls"):
            return str(text or "")
    return None
