"""The rank that torchrun assigned to this process."""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Self

from attrs import frozen

from modulm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Launched"]

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


@frozen
class Launched:
    """The variables that torchrun sets for each process.

    rank: of `ranks`. local_rank: of the `local_ranks` on this machine. address: of this machine, if
    there are several and it is known.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    address: str = ""

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Self:
        """Parse the environment. Raises ConfigError if a variable is missing."""
        if variables.get("WORLD_SIZE") == "1":  # a script that sets them itself, as TRL does
            variables = {"LOCAL_WORLD_SIZE": "1", **variables}
        missing = [name for name in (*_NUMBERS, "MASTER_ADDR") if not variables.get(name)]
        if missing:
            raise ConfigError(
                "distributed_executor_backend",
                f"external_launcher is for scripts that torchrun starts: {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set",
            )
        try:
            *numbers, port = (int(variables[name]) for name in _NUMBERS)
        except ValueError as error:
            raise ConfigError("distributed_executor_backend", f"torchrun's {error}") from error
        rank, ranks, local_rank, local_ranks = numbers
        address = "" if ranks == local_ranks else _own_address(variables["MASTER_ADDR"], port)
        return cls(rank, ranks, local_rank, local_ranks, address)


def _own_address(master: str, port: int) -> str:
    """Return this machine's address as seen by rank 0; "" for the address of its host name."""
    with suppress(OSError):
        family, kind, _, _, where = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(where)  # sends nothing
            address: str = asking.getsockname()[0]
            return "" if ip_address(address.partition("%")[0]).is_loopback else address
    return ""
