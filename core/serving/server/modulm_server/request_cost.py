"""Limits on the total cost of a request: its sequences and its stored log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from modulm_frontend.beam_search import BeamSearchParams
from modulm_server.flags import ServerConfig
from modulm_server.json_body import bad_field

if TYPE_CHECKING:
    from modulm.contracts.engine_info import EngineInfo
    from modulm.contracts.sampling import SamplingParams

__all__ = ["check_cost"]

#: Log probabilities per token that a single sequence may always request, as in OpenAI's API.
_ALWAYS = 21


def check_cost(
    params: SamplingParams | BeamSearchParams,
    prompts: Sequence[int],
    info: EngineInfo,
    server: ServerConfig,
) -> None:
    """Raise ApiError(400) if a request exceeds the limits on sequences or log probabilities.

    prompts: the number of tokens of each.
    """
    beams = isinstance(params, BeamSearchParams)
    each = params.n if isinstance(params, BeamSearchParams) else max(params.n, params.best_of or 0)
    sequences = each * len(prompts)
    if sequences > server.max_request_sequences:
        raise bad_field(
            "n",
            f"n: {len(prompts)} prompts with {each} {'beams' if beams else 'choices'} each are "
            f"{sequences} sequences; the limit is {server.max_request_sequences} "
            "(--max-request-sequences)",
        )
    total = 0
    for tokens in prompts:
        room = max(info.max_model_len - tokens, 0)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        total += each * most * _per_token(params.logprobs, info)
        if not isinstance(params, BeamSearchParams):
            total += each * tokens * _per_token(params.prompt_logprobs, info)
    least = info.max_model_len * _ALWAYS * (2 if sequences == 1 else 1)
    if total > max(server.max_request_logprobs, least):
        raise bad_field(
            "logprobs",
            f"logprobs: {sequences} sequences may return up to {total} log probabilities; the "
            f"limit is {server.max_request_logprobs} (--max-request-logprobs): request fewer, or "
            "set max_tokens",
        )


def _per_token(best: int | None, info: EngineInfo) -> int:
    """Stored log probabilities per token."""
    return 0 if best is None else 1 + (info.vocabulary if best == -1 else best)
