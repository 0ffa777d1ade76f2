"""What the numbers of a request multiply to: sequences, and log probabilities that are kept."""

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

#: Log probabilities per token that one sequence may always have, as in OpenAI's API.
_ALWAYS = 21


def check_cost(
    params: SamplingParams | BeamSearchParams,
    prompts: Sequence[int],
    info: EngineInfo,
    server: ServerConfig,
) -> None:
    """Raise ApiError(400) for a request whose fields multiply to more than the flags allow.

    prompts: tokens in each.
    """
    beams = isinstance(params, BeamSearchParams)
    each = params.n if isinstance(params, BeamSearchParams) else max(params.n, params.best_of or 0)
    sequences = each * len(prompts)
    if sequences > server.max_request_sequences:
        raise bad_field(
            "n",
            f"n: {len(prompts)} prompts with {each} {'beams' if beams else 'choices'} each are "
            f"{sequences} sequences; a request may have {server.max_request_sequences} "
            "(--max-request-sequences)",
        )
    kept = 0
    for tokens in prompts:
        room = max(info.max_model_len - tokens, 0)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        kept += each * most * _per_token(params.logprobs, info)
        if not isinstance(params, BeamSearchParams):
            kept += each * tokens * _per_token(params.prompt_logprobs, info)
    least = info.max_model_len * _ALWAYS * (2 if sequences == 1 else 1)
    if kept > max(server.max_request_logprobs, least):
        raise bad_field(
            "logprobs",
            f"logprobs: up to {kept} log probabilities would be kept for {sequences} sequences; a "
            f"request may have {server.max_request_logprobs} (--max-request-logprobs): ask for "
            "fewer, or set max_tokens",
        )


def _per_token(best: int | None, info: EngineInfo) -> int:
    """Log probabilities that are kept of one token."""
    return 0 if best is None else 1 + (info.vocabulary if best == -1 else best)
