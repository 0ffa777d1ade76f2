"""Routed experts: those that the routers of a mixture chose, returned with answers, and replayed.

Requests use two entries of `SamplingParams.extra_args`: see `modulm_expert_routes.requests`.
`chosen_experts` reads the experts of an output.
"""

from modulm_expert_routes.requests import (
    FIELD,
    START,
    Replay,
    chosen_experts,
    encode_routes,
    routes_of,
    with_replay,
    with_replay_salt,
)

__all__ = [
    "FIELD",
    "START",
    "Replay",
    "chosen_experts",
    "encode_routes",
    "routes_of",
    "with_replay",
    "with_replay_salt",
]
