"""Common parts of completion and chat responses: ids, usage, log probabilities."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

import modulm
from modulm.contracts.parser import Content, Reasoning
from modulm_expert_routes import encode_routes
from modulm_plugin_lock import lock_digest
from modulm_server.flags import ServerConfig
from modulm_server.logprobs import MIN_LOGPROB, token_logprobs, token_name
from modulm_server.request_guard import safe_id
from modulm_server.running_requests import current_request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from starlette.requests import Request

    from modulm.contracts.outputs import RequestMetrics, RequestOutput
    from modulm.contracts.parser import Event
    from modulm_route_openai.objects import (
        ChatChoice,
        ChatLogprobs,
        CompletionLogprobs,
        CompletionTokens,
        Measured,
        Metrics,
        PromptLogprob,
        ToolCallDelta,
        Usage,
        WeightVersion,
    )
    from modulm_server.chat_turn import Message
    from modulm_server.sampling import SamplingFields

__all__ = [
    "StreamUsage",
    "add_arguments",
    "add_engine_fields",
    "answer_id",
    "chat_logprobs",
    "completion_logprobs",
    "draft_metrics",
    "fingerprint",
    "paced",
    "prompt_logprobs",
    "split_in_order",
    "usage",
    "version_ranges",
]

#: Hexadecimal digits of a lock's digest in `system_fingerprint`.
_LOCK_DIGITS = 12

_T = TypeVar("_T")
_Formatted = TypeVar("_Formatted")


async def paced(
    choices: Sequence[_T], show: Callable[[_T], _Formatted]
) -> AsyncIterator[_Formatted]:
    """Format choices one by one, yielding to the event loop in between."""
    for index, each in enumerate(choices):
        if index:
            await asyncio.sleep(0)
        yield show(each)


def answer_id(prefix: str, request: Request, wished: str | None) -> str:
    """The id of a response, by which it can be aborted. wished: the body's `request_id`."""
    name = safe_id(wished or "") or request.scope["modulm.id"]
    running = current_request()
    if running is not None:
        running.add_id(prefix, name)
    return f"{prefix}-{name}"


def fingerprint(config: Any, engine: Any) -> str | None:
    """`system_fingerprint`, by --fingerprint-mode: version, dtype, and the digest of
    --plugins-lock and version of the weights, if there are any.
    """
    server = config.group(ServerConfig)
    if server.fingerprint_mode == "custom":
        text: str | None = server.fingerprint_value
        return text
    if server.fingerprint_mode == "none":
        return None
    full = f"modulm-{modulm.__version__}-{engine.info.dtype}"
    if (lock := lock_digest(config)) is not None:
        full = f"{full}-p{lock[:_LOCK_DIGITS]}"
    if engine.weight_version:
        full = f"{full}-w{engine.weight_version}"
    return full if server.fingerprint_mode == "full" else sha256(full.encode()).hexdigest()[:16]


def usage(
    prompt: int, generated: int, cached: int | None, reasoning: int | None = None, audio: int = 0
) -> Usage:
    """OpenAI's usage, with cached and reasoning tokens if known. audio: frames of sound."""
    generated += audio
    counted: Usage = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }
    if cached is not None:
        counted["prompt_tokens_details"] = {"cached_tokens": cached}
    details: CompletionTokens = {}
    if reasoning is not None:
        details["reasoning_tokens"] = reasoning
    if audio:
        details["audio_tokens"] = audio
    if details:
        counted["completion_tokens_details"] = details
    return counted


def draft_metrics(
    body: SamplingFields, config: Any, single: RequestOutput | None, generated: int
) -> Measured:
    """`metrics` of a response, if the server or the request enables it: speculative decoding
    metrics, null without a drafter, and timings. single: the last output of a response with one
    choice. generated: its tokens.
    """
    level = config.group(ServerConfig).per_request_spec_decode_metrics
    if level == "none" and not body.include_metrics:
        return {}
    choices = () if single is None else single.outputs
    metrics = choices[0].spec_decode_metrics if choices else None
    report = None if metrics is None else metrics.to_dict(detailed=level == "detailed")
    figures: Metrics = {"speculative_decoding": report}
    timed = body.include_metrics and config.group(ServerConfig).enable_per_request_metrics
    if timed and single is not None and single.metrics is not None and len(choices) == 1:
        _add_times(figures, single.metrics, generated)
    return {"metrics": figures}


def _add_times(figures: Metrics, times: RequestMetrics, tokens: int) -> None:
    """Add a request's times in milliseconds. tokens: of its only choice."""

    def between(begin: float | None, end: float | None) -> float | None:
        return None if begin is None or end is None else (end - begin) * 1000

    generation = between(times.first_token_time, times.last_token_time)
    gaps = tokens - 1
    figures["time_to_first_token_ms"] = between(times.arrival_time, times.first_token_time)
    figures["generation_time_ms"] = generation
    figures["queue_time_ms"] = between(times.arrival_time, times.first_scheduled_time)
    figures["mean_itl_ms"] = generation / gaps if generation is not None and gaps > 0 else None
    figures["tokens_per_second"] = gaps * 1000 / generation if generation and gaps > 0 else None


def cached_tokens(body: SamplingFields, config: Any, *outputs: Any) -> int | None:
    """Return the prompt tokens found in the cache, if the server or the request asks for them."""
    if not _reports_cache(body, config):
        return None
    return sum(output.num_cached_tokens or 0 for output in outputs)


def _reports_cache(body: SamplingFields, config: Any) -> bool:
    asked = body.prompt_cache_key is not None or body.prompt_cache_retention is not None
    return asked or config.group(ServerConfig).enable_prompt_tokens_details


class StreamUsage:
    """Tracks the usage of a stream, which is sent in every chunk, in a last one, or not at all."""

    def __init__(self, body: SamplingFields, config: Any) -> None:
        options = body.stream_options
        forced = config.group(ServerConfig).enable_force_include_usage
        self.last = forced or bool(options and options.include_usage)
        self.each = bool(options and options.continuous_usage_stats)
        self._details = _reports_cache(body, config)
        self._prompts: dict[int, tuple[int, int | None]] = {}
        self._generated: dict[int, int] = {}

    def prompt(self, prompt_index: int, tokens: int, cached: int | None) -> None:
        """Record the tokens of a prompt."""
        self._prompts[prompt_index] = (tokens, cached)

    def generated(self, index: int, tokens: int) -> None:
        """Record the number of tokens of a choice so far."""
        self._generated[index] = tokens

    def total(self, reasoning: int | None = None, audio: int = 0) -> Usage:
        """The usage of all prompts and choices so far. reasoning: thinking tokens. audio: frames
        of sound.
        """
        cached = sum(hit or 0 for _, hit in self._prompts.values()) if self._details else None
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        return usage(prompt, sum(self._generated.values()), cached, reasoning, audio)

    def now(self, index: int, prompt_index: int = 0) -> Usage:
        """The usage of one choice so far."""
        return usage(self._prompts[prompt_index][0], self._generated.get(index, 0), None)


def chat_logprobs(
    positions: Sequence[Mapping[int, Any]] | None,
    token_ids: Sequence[int],
    top: int,
    as_ids: bool,
) -> ChatLogprobs | None:
    """`logprobs` of a chat choice."""
    if positions is None:
        return None
    return {"content": token_logprobs(positions, token_ids, top, as_ids)}


def completion_logprobs(
    positions: Sequence[Mapping[int, Any] | None] | None,
    token_ids: Sequence[int],
    top: int,
    as_ids: bool,
    offset: int,
    text_of: Callable[[int], str],
) -> CompletionLogprobs | None:
    """`logprobs` of a completion; `offset`: characters before the first token.

    text_of: the text of a token without a probability, such as the prompt's first one.
    """
    if positions is None:
        return None
    logprobs: CompletionLogprobs = {
        "text_offset": [],
        "token_logprobs": [],
        "tokens": [],
        "top_logprobs": [],
    }
    for token, position in zip(token_ids, positions, strict=True):
        entry = None if position is None else position[token]
        entry_name = text_of(token) if not as_ids else f"token_id:{token}"
        name = entry_name if entry is None else token_name(token, entry, as_ids)
        logprobs["text_offset"].append(offset)
        logprobs["tokens"].append(name)
        logprobs["token_logprobs"].append(
            None if entry is None else max(entry.logprob, MIN_LOGPROB)
        )
        logprobs["top_logprobs"].append(_best(position, token, top, as_ids))
        offset += len(name)
    return logprobs


def _best(
    position: Mapping[int, Any] | None, token: int, top: int, as_ids: bool
) -> dict[str, float] | None:
    if position is None:
        return None
    selected = {t: e for t, e in position.items() if t == token or (e.rank or 0) <= top}
    return {token_name(t, e, as_ids): max(e.logprob, MIN_LOGPROB) for t, e in selected.items()}


def prompt_logprobs(
    positions: Sequence[Mapping[int, Any] | None] | None,
) -> list[dict[str, PromptLogprob] | None] | None:
    """`prompt_logprobs` in vLLM's form: an object per position, keyed by token id."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token): {
                "logprob": max(entry.logprob, MIN_LOGPROB),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token, entry in position.items()
        }
        for position in positions
    ]


def version_ranges(ranges: Sequence[tuple[int, int, int]]) -> list[WeightVersion]:
    """`weight_versions` of a choice in vLLM's form. ranges: `CompletionOutput.weight_versions`."""
    return [{"version": str(version), "start": first, "end": end} for version, first, end in ranges]


def add_engine_fields(choice: ChatChoice, body: SamplingFields, message: Message) -> None:
    """Add what a request asked to know of the engine: token ids, versions of weights, experts."""
    if body.return_token_ids:
        choice["token_ids"] = list(message.token_ids)
    if body.return_weight_versions:
        choice["weight_versions"] = version_ranges(message.weight_versions)
    if message.routed_experts is not None:
        choice["routed_experts"] = encode_routes(message.routed_experts)


def add_arguments(calls: list[ToolCallDelta], index: int, text: str) -> None:
    """Append a part of a call's arguments to the deltas of calls."""
    if calls and calls[-1]["index"] == index:
        calls[-1]["function"]["arguments"] += text
    else:
        calls.append({"index": index, "function": {"arguments": text}})


def split_in_order(events: Sequence[Event]) -> list[Sequence[Event]]:
    """Split events into runs that fit into one delta each: reasoning, then content, then calls."""
    if len(events) < 2:
        return [events]
    runs: list[list[Event]] = [[]]
    last = 0
    for event in events:
        rank = 0 if isinstance(event, Reasoning) else 1 if isinstance(event, Content) else 2
        if rank < last:
            runs.append([])
        runs[-1].append(event)
        last = rank
    return list(runs)
