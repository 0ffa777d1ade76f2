"""What a request says about experts: two entries of `SamplingParams.extra_args`.

`routed_experts_prompt_start`: the first token whose experts are returned. `routed_experts`: the
experts to use, as they were returned, for the tokens from there on: an array of integers
[tokens, layers, top_k], or its .npy file in base64.
"""

from __future__ import annotations

import base64
import hashlib
import io
from typing import TYPE_CHECKING, Any

from attrs import frozen

from modulm.contracts.sampling import SamplingParams
from modulm.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from modulm.contracts.outputs import CompletionOutput
    from modulm.contracts.sampling import PoolingParams

__all__ = [
    "FIELD",
    "START",
    "Replay",
    "chosen_experts",
    "encode_routes",
    "is_salted",
    "routes_of",
    "with_replay",
    "with_replay_salt",
]

#: Names of the entries of `extra_args`. Answers have the first, too (`CompletionOutput.arrays`).
FIELD = "routed_experts"
START = "routed_experts_prompt_start"


@frozen(eq=False)
class Replay:
    """What a request says. start: first token. experts: [tokens, layers, top_k], or None."""

    start: int = 0
    experts: np.ndarray | None = None


def chosen_experts(output: CompletionOutput) -> np.ndarray | None:
    """Return the experts that the routers chose: integers [tokens, layers, top_k].

    Of the prompt and all tokens but the last; of new tokens in a delta stream. None without
    `--enable-return-routed-experts`.
    """
    return (output.arrays or {}).get(FIELD)


def encode_routes(routes: np.ndarray) -> str:
    """Encode routed experts for JSON, as vLLM does: a .npy file in base64."""
    import numpy as np

    file = io.BytesIO()
    np.save(file, routes, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode("ascii")


def with_replay(
    arguments: Mapping[str, Any] | None, start: int | None, experts: str | None
) -> dict[str, Any] | None:
    """Return `extra_args` with the fields of a request; None stays None."""
    fields = {START: start or None, FIELD: experts}
    more = {name: value for name, value in fields.items() if value is not None}
    return {**(arguments or {}), **more} if more else (None if arguments is None else {**arguments})


def routes_of(params: SamplingParams | PoolingParams) -> Replay:
    """Read the entries. Raises RequestError if they are malformed."""
    arguments = params.extra_args if isinstance(params, SamplingParams) else None
    if not arguments or not (FIELD in arguments or START in arguments):
        return Replay()
    start = arguments.get(START) or 0
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise RequestError(f"{START} must be an integer, 0 or more", START)
    value = arguments.get(FIELD)
    return Replay(start, None if value is None else _experts(value))


def with_replay_salt(salt: str | None, params: SamplingParams | PoolingParams) -> str | None:
    """Return the cache salt of a request: keys and values depend on the experts it hands back.

    Raises RequestError if these are malformed.
    """
    replay = routes_of(params)
    if replay.experts is None:
        return salt
    return f"{salt or ''}#{_digest(replay)}"


def is_salted(salt: str | None, replay: Replay) -> bool:
    """Whether a salt separates the request's blocks from those of other experts."""
    return replay.experts is None or f"#{_digest(replay)}" in (salt or "")


def _digest(replay: Replay) -> str:
    import numpy as np

    experts = np.ascontiguousarray(replay.experts, dtype=np.int32)
    shape = f"{replay.start} {experts.shape}".encode()
    return hashlib.sha256(shape + experts.tobytes(), usedforsecurity=False).hexdigest()


def _experts(value: Any) -> np.ndarray:
    import numpy as np

    if isinstance(value, str):
        try:
            data = io.BytesIO(base64.b64decode(value, validate=True))
            value = np.load(data, allow_pickle=False)
        except (ValueError, TypeError, ArithmeticError, EOFError, OSError, MemoryError) as error:
            raise RequestError(f"{FIELD} is no .npy file in base64: {error}", FIELD) from None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or value.ndim != 3:
        raise RequestError(f"{FIELD} must be integers [tokens, layers, experts per token]", FIELD)
    return value
