"""What engines say to one another: messages of msgpack behind their length, and blocks' bytes.

A connection has one question, `{"engine": facts, "names": [...], "seconds": S, "computing": whether
the blocks are being computed, "shared": whether shared memory can be read, "nixl": whether NIXL
can}`. The answer is `{"refused": reason}`, or `{"blocks": N, "tensors": layout,
"tensor_parallel_size": T, "memory": M, "nixl": X}`. M and X describe shared memory and an agent of
NIXL, or are None. If one of them is offered, the asking side says `{"slots": whether it reads
them}`.

Then blocks follow in parts, as they are computed: `{"blocks": K}` and their bytes, or `{"slots":
[...]}` of the memory, which is answered by `{"copied": K}`. With `"tensors": [...]`, a part has
only these tensors of its blocks (numbers in the layout), and the others follow while the step that
computes them runs. `{"complete": true}` or `{"missing": N}` is the end. Both sides prove that they
know the secret, and everything that goes through a socket is encrypted (TLS 1.3).
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

import msgspec

__all__ = ["Deadline", "Fault", "differing", "receive", "receive_into", "send", "set_deadline"]

_LENGTH = struct.Struct(">I")
#: Maximum bytes of a message: names of half a million tokens, and more.
_MAX_MESSAGE = 1 << 22


class Fault(Exception):
    """A fetch failed. The message has no final full stop."""


class Deadline:
    """The time at which a connection ends.

    seconds: from now. renewed: whether they begin anew with each part of the answer, because the
    blocks are still being computed.
    """

    def __init__(self, seconds: float, *, renewed: bool = False) -> None:
        self._seconds, self.renewed = seconds, renewed
        self._at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left. Raises Fault if there are none."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise Fault("the time is up")
        return left

    def renew(self) -> None:
        """Record that a part has arrived."""
        if self.renewed:
            self._at = time.monotonic() + self._seconds


def set_deadline(peer: socket.socket, deadline: Deadline) -> None:
    """Limit the next call on the socket. Raises Fault after the deadline."""
    peer.settimeout(deadline.left)


def send(peer: socket.socket, message: Mapping[str, Any], deadline: Deadline) -> None:
    """Send a message. Raises OSError, or Fault if the time is up."""
    packed = msgspec.msgpack.encode(message)
    set_deadline(peer, deadline)
    peer.sendall(_LENGTH.pack(len(packed)) + packed)


def receive(peer: socket.socket, deadline: Deadline) -> dict[str, Any]:
    """Receive a message. Raises OSError, or Fault for anything else than a message."""
    head = bytearray(_LENGTH.size)
    receive_into(peer, memoryview(head), deadline)
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_MESSAGE:
        raise Fault(f"a message of {length} bytes")
    body = bytearray(length)
    receive_into(peer, memoryview(body), deadline)
    try:
        return msgspec.msgpack.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise Fault("the message cannot be read") from error


def receive_into(peer: socket.socket, into: memoryview, deadline: Deadline) -> None:
    """Fill `into`. Raises OSError, or Fault if the connection ends or the time is up."""
    count = 0
    while count < len(into):
        set_deadline(peer, deadline)
        more = peer.recv_into(into[count:])
        if not more:
            raise Fault("the connection ended")
        count += more


def differing(here: Mapping[str, str], there: Mapping[str, Any]) -> str | None:
    """Return how two engines differ, with the flag's name; None if their blocks are alike."""
    for key, value in here.items():
        if there.get(key) != value:
            return f"{key} is {value} where the blocks are, and {there.get(key)} here"
    return None
