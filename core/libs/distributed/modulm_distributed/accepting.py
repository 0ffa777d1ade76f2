"""Accept connections in a thread, also while the machine is short of descriptors or memory."""

from __future__ import annotations

import errno
import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

__all__ = ["accepted"]

log = logging.getLogger("modulm.engine")

#: The listener was closed, or shut down.
_OVER = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)
#: The peer went away before its connection was accepted.
_GONE = (errno.ECONNABORTED, errno.ECONNRESET, errno.EPROTO, errno.ETIMEDOUT, errno.EINTR)
#: Seconds to wait when the machine has no room for a connection.
_PAUSE = 0.5


def accepted(listener: socket.socket, closed: threading.Event) -> Iterator[socket.socket]:
    """Yield connections until the listener is shut down or closed, or `closed` is set.

    No other error ends it: connections wait in the listener's queue until there is room for them.
    """
    short = False
    while not closed.is_set():
        try:
            peer, _ = listener.accept()
        except OSError as error:
            if error.errno in _OVER:
                return
            if error.errno in _GONE:
                continue
            if not short:
                log.warning("connections wait: %s", error.strerror)
            short = True
            closed.wait(_PAUSE)
            continue
        short = False
        yield peer
