"""`kv_transfer_params` of requests and answers: what proxies between engines pass on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

__all__ = ["Transferred", "transferred", "with_transfer"]


class Transferred(TypedDict, total=False):
    """Where another engine finds the prompt's KV cache, if the request asked for it."""

    kv_transfer_params: dict[str, Any]


def transferred(output: Any) -> Transferred:
    """Return `kv_transfer_params` of an output, if it has some."""
    params = output.kv_transfer_params
    return {} if params is None else {"kv_transfer_params": dict(params)}


def with_transfer(
    arguments: Mapping[str, Any] | None, params: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return `extra_args` of a request with `kv_transfer_params`, which vLLM has there, too."""
    if params is not None:
        return {**(arguments or {}), "kv_transfer_params": params}
    return None if arguments is None else dict(arguments)
