"""Responses in llama.cpp's form, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, field

if TYPE_CHECKING:
    from modulm.contracts.outputs import CompletionOutput, Position
    from modulm_route_llama_cpp.objects import Completion, Piece, Timings, TokenProbability
    from modulm_server.errors import ApiError

__all__ = ["Answer", "chosen_fields", "failure", "probabilities"]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


def failure(error: ApiError, message: str) -> dict[str, Any]:
    """Build an error in llama.cpp's form."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else error.kind)
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return {"error": {"code": error.status, "message": message, "type": kind, "param": error.param}}


@define(eq=False)
class Answer:
    """A response in progress. nothing: generate no token. best: log probabilities per token."""

    index: int
    model: str
    settings: Mapping[str, Any]
    nothing: bool = False
    best: int = 0
    keep_tokens: bool = False
    started: float = field(factory=time.monotonic)
    first: float | None = None
    text: str = ""
    generated: int = 0

    def piece(self, output: Any, choice: CompletionOutput) -> Piece:
        """Add a step's output; returns its part of the response."""
        if self.first is None:
            self.first = time.monotonic()
        text = "" if self.nothing else choice.text
        ids = [] if self.nothing else list(choice.token_ids)
        self.text += text
        self.generated += len(ids)
        part: Piece = {
            "index": self.index,
            "content": text,
            "tokens": ids if self.keep_tokens else [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self.generated,
            "tokens_evaluated": len(output.prompt_token_ids),
        }
        if self.best and not self.nothing:
            part["completion_probabilities"] = probabilities(choice.logprobs or (), self.best)
        return part

    def end(self, piece: Piece, output: Any, choice: CompletionOutput, prompt: str) -> Completion:
        """The final part: the stop reason and the statistics."""
        word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        ended = "word" if word else "limit" if choice.finish_reason == "length" else "eos"
        return {
            **piece,
            "stop": True,
            "model": self.model,
            "generation_settings": dict(self.settings),
            "prompt": prompt,
            "has_new_line": "\n" in self.text,
            "truncated": False,
            "stop_type": "limit" if self.nothing else ended,
            "stopping_word": word,
            "tokens_cached": len(output.prompt_token_ids) + self.generated,
            "timings": self.timings(output),
        }

    def timings(self, output: Any) -> Timings:
        """Timings so far: prompt processing up to the first token, then generation."""
        now = time.monotonic()
        first = now if self.first is None else self.first
        cached = output.num_cached_tokens or 0
        read = len(output.prompt_token_ids) - cached
        prompt, predicted = 1e3 * (first - self.started), 1e3 * (now - first)
        return {
            "cache_n": cached,
            "prompt_n": read,
            "prompt_ms": prompt,
            "prompt_per_token_ms": prompt / max(read, 1),
            "prompt_per_second": 1e3 * read / max(prompt, 1e-3),
            "predicted_n": self.generated,
            "predicted_ms": predicted,
            "predicted_per_token_ms": predicted / max(self.generated, 1),
            "predicted_per_second": 1e3 * self.generated / max(predicted, 1e-3),
        }


def probabilities(positions: Sequence[Position], best: int) -> list[TokenProbability]:
    """Build one entry per token, with its `best` top candidates."""
    result: list[TokenProbability] = []
    for position in positions:
        entries = list(position.items())
        ranked = sorted(entries, key=lambda entry: entry[1].rank or 0)
        chosen = _entry(*entries[0])
        chosen["top_logprobs"] = [_entry(*entry) for entry in ranked[:best]]
        result.append(chosen)
    return result


def _entry(token: int, one: Any) -> TokenProbability:
    text = one.decoded_token or ""
    return {"id": token, "token": text, "bytes": list(text.encode()), "logprob": one.logprob}


def chosen_fields(answer: Mapping[str, Any], fields: Sequence[str] | None) -> Mapping[str, Any]:
    """Select the `response_fields` of a response, with / for nested ones. Ignores missing ones."""
    if not fields:
        return answer
    selected = {}
    for name in fields:
        value: Any = answer
        for part in name.split("/"):
            value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is not _MISSING:
            selected[name.rpartition("/")[2]] = value
    return selected


_MISSING = object()
