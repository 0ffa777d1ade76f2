"""Connectors that move blocks between engines, as requests ask for it.

A proxy sends a prompt to one engine with `do_remote_decode`; the engine's answer says where its
blocks are. The proxy passes that on to another engine, with `do_remote_prefill`. Source: the
`kv_transfer_params` of vLLM's proxies.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from modulm.contracts.connector import BlockTransfer, KVConnector, KVIndex, TransferPlan
from modulm.contracts.sampling import SamplingParams
from modulm.errors import RequestError

if TYPE_CHECKING:
    from modulm.contracts.requests import Request

__all__ = ["FIELD", "LayeredPlan", "RemoteConnector", "RemoteIndex", "transfer_params"]

#: The request field; `SamplingParams.extra_args` has it under the same name, as in vLLM.
FIELD = "kv_transfer_params"


def transfer_params(request: Request) -> Mapping[str, Any]:
    """Return the request's `kv_transfer_params`, or {}. Raises RequestError if malformed."""
    params = request.params
    extras = params.extra_args if isinstance(params, SamplingParams) else None
    table = (extras or {}).get(FIELD)
    if table is None:
        return {}
    if not isinstance(table, Mapping):
        raise RequestError(f"{FIELD} must be an object", FIELD)
    for key in ("do_remote_prefill", "do_remote_decode"):
        if not isinstance(table.get(key), bool | None):
            raise RequestError(f"{key} must be true or false", FIELD)
    return table


@frozen
class LayeredPlan(TransferPlan):
    """Transfers of a step, with those that save what it computes (`modulm_kv_transfer.layers`).

    computing: saves of blocks that are full after this step. committed, dropped: ids of such saves
    of earlier steps, which succeeded or failed.
    """

    computing: tuple[BlockTransfer, ...] = ()
    committed: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


class RemoteIndex(KVIndex):
    """The scheduler's half of a connector between engines."""

    medium = "p2p"

    @abstractmethod
    def check(self, request: Request) -> None:
        """Raise RequestError if the request's `kv_transfer_params` cannot be served."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Remember a request, which passed `check`, until `finish`. Called once."""

    @abstractmethod
    def source(self, request: str) -> Any:
        """Return `BlockTransfer.source` of the request's load, which starts now."""

    @abstractmethod
    def answer(self, request: str) -> Mapping[str, Any] | None:
        """Return `kv_transfer_params` for the answer, or None. Called once the request runs."""


class RemoteConnector(KVConnector):
    """A connector whose index is a `RemoteIndex`."""

    @abstractmethod
    def describe_engine(self, facts: Mapping[str, str], replica: int) -> None:
        """Called once, after `bind`.

        facts: what two engines must have in common, by flag. replica: number of this replica on its
        machine.
        """
