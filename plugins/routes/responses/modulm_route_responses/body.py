"""Checks of requests, and the response object."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from modulm_route_responses.schema import LOGPROBS
from modulm_server.json_body import bad_field
from modulm_server.prompt_caching import creation_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.sampling import SamplingParams
    from modulm_route_responses.objects import ResponseObject, Usage
    from modulm_route_responses.schema import ResponsesRequest

__all__ = ["refuse", "response", "summed", "usage"]

#: Supported values of `include`. Reasoning is never encrypted; items include it as text.
_INCLUDES = frozenset({LOGPROBS, "reasoning.encrypted_content"})


def refuse(body: ResponsesRequest) -> None:
    """Raise ApiError(400) for unsupported fields and combinations."""
    if body.conversation is not None and body.previous_response_id is not None:
        raise bad_field("conversation", "conversation cannot be combined with previous_response_id")
    if unknown := set(body.include or ()) - _INCLUDES:
        raise bad_field("include", f"include: {min(unknown)[:64]!r} is not supported")
    if body.truncation not in (None, "auto", "disabled"):
        raise bad_field("truncation", "truncation must be auto or disabled")
    if body.background and body.store is False:
        raise bad_field("store", "store must be true for background responses")
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "stream_options needs stream: true")
    if body.service_tier not in (None, "auto", "default"):
        raise bad_field("service_tier", "service_tier must be auto or default")


def response(body: ResponsesRequest, model: str, params: SamplingParams) -> ResponseObject:
    """Create the response object, without output."""
    return {
        "id": body.request_id or f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt": body.prompt,
        "reasoning": body.reasoning,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def usage(output: Any, generated: int, reasoning: int) -> Usage:
    """Token usage of a response. reasoning: thinking tokens among the generated ones."""
    prompt = len(output.prompt_token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": output.num_cached_tokens or 0,
            "cache_write_tokens": sum(creation_tokens(output).values()),
        },
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": min(reasoning, generated)},
        "total_tokens": prompt + generated,
    }


def summed(usages: Sequence[Usage]) -> Usage:
    """The usage of a response with several turns: between them, the server called tools."""
    read = sum(each["input_tokens"] for each in usages)
    written = sum(each["output_tokens"] for each in usages)
    before = [each["input_tokens_details"] for each in usages]
    thoughts = [each["output_tokens_details"]["reasoning_tokens"] for each in usages]
    return {
        "input_tokens": read,
        "input_tokens_details": {
            "cached_tokens": sum(each["cached_tokens"] for each in before),
            "cache_write_tokens": sum(each["cache_write_tokens"] for each in before),
        },
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": sum(thoughts)},
        "total_tokens": read + written,
    }
