"""What engines say to one another: messages of msgpack behind their length, and blocks' bytes.

A connection has one question, `{"engine": facts, "names": [...], "seconds": S}`, and one answer:
`{"refused": reason}`, `{"missing": N}`, or `{"blocks": N, "width": bytes of a block}` and then the
blocks. Both sides prove that they know the secret, and everything is encrypted (TLS 1.3).
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

import msgspec

__all__ = ["Fault", "differing", "receive", "receive_into", "send", "set_deadline"]

_LENGTH = struct.Struct(">I")
#: Maximum bytes of a message: names of half a million tokens, and more.
_MAX_MESSAGE = 1 << 22


class Fault(Exception):
    """A fetch failed. The message has no final full stop."""


def set_deadline(peer: socket.socket, deadline: float) -> None:
    """Limit the next call on the socket. Raises Fault after `deadline` (monotonic seconds)."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise Fault("the time is up")
    peer.settimeout(left)


def send(peer: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message. Raises OSError."""
    packed = msgspec.msgpack.encode(message)
    peer.sendall(_LENGTH.pack(len(packed)) + packed)


def receive(peer: socket.socket, deadline: float) -> dict[str, Any]:
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


def receive_into(peer: socket.socket, into: memoryview, deadline: float) -> None:
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
