"""WebSocket connections that read long messages in threads.

uvicorn's protocol reads on the event loop. Unmasking and decoding a message of 16 MiB holds it for
0.1 s, and a single read may bring thousands of short frames.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Request

__all__ = ["WebSocketProtocol"]

log = logging.getLogger("modulm_server")

#: Bytes that are read at once on the event loop: about a millisecond, if all frames are short.
_SMALL = 1 << 13
#: Seconds after which a ping that a thread held up is tried again.
_AGAIN = 0.1


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One connection. While a thread reads, nothing else uses `conn`, and the socket is paused."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._unread: list[bytes] = []
        self._reading: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        """Read frames, in a thread if they are long or parts of a message."""
        if self._reading is None:
            if not self.frames and len(self.conn.reader.buffer) + len(data) < _SMALL:
                super().data_received(data)
                return
            self._idle.clear()
            self._pause()
            self._reading = self.loop.create_task(self._read())
        self._unread.append(data)

    async def _read(self) -> None:
        try:
            while self._unread:
                parts, self._unread = self._unread, []
                results = await self.loop.run_in_executor(None, self._parse, parts)
                if self.conn.parser_exc is not None:
                    self.handle_parser_exception()
                    return
                for result in results:
                    self._handle(result)
                if output := self.conn.data_to_send():  # answers to pings
                    self.transport.write(b"".join(output))
        except BaseException as error:
            self.transport.close()
            if not isinstance(error, Exception):
                raise
            log.exception("A WebSocket connection failed")
        finally:
            self._reading = None
            self._idle.set()
            if self.read_paused and self.queue.empty() and not self.transport.is_closing():
                self.read_paused = False
                self.transport.resume_reading()

    def _parse(self, parts: list[bytes]) -> list[Any]:
        """Read frames. Returns requests and control frames, and messages for the application; None
        stands for a text that is not UTF-8.
        """
        for part in parts:
            self.conn.receive_data(part)
            if self.conn.parser_exc is not None:
                return []
        results: list[Any] = []
        for event in self.conn.events_received():
            if not isinstance(event, Frame) or event.opcode in _CONTROL:
                results.append(event)
                continue
            if event.opcode is Opcode.CONT:
                self.frames = [_extended(self.frames[0], event.data)]
            else:
                self.curr_msg_data_type = "text" if event.opcode is Opcode.TEXT else "bytes"
                self.frames = [event.data]  # type: ignore[list-item]
            if event.fin:
                results.append(self._message())
        return results

    def _message(self) -> dict[str, Any] | None:
        """The message that has ended."""
        (data,), self.frames = self.frames, []
        if self.curr_msg_data_type == "bytes":
            return {"type": "websocket.receive", "bytes": bytes(data)}
        try:
            return {"type": "websocket.receive", "text": data.decode()}
        except UnicodeDecodeError:
            return None

    def _handle(self, result: Any) -> None:
        if isinstance(result, Request):
            self.handle_connect(result)
        elif isinstance(result, Frame):
            if result.opcode is Opcode.CLOSE:
                self.handle_close(result)
            elif result.opcode is Opcode.PONG:
                self.handle_pong(result)
        elif self.close_sent:  # the application waits for nothing but the end
            return
        elif result is None:
            self.conn.send_close(1007)
            self.handle_parser_exception()
        else:
            self.queue.put_nowait(result)
            self._pause()

    def _pause(self) -> None:
        """Read nothing more until the application has taken all messages."""
        if not self.read_paused and not self.transport.is_closing():
            self.read_paused = True
            self.transport.pause_reading()

    async def send(self, message: Any) -> None:
        """Send an event of the application, once no thread reads."""
        await self.writable.wait()
        while self._reading is not None:
            await self._idle.wait()
            await self.writable.wait()
        await super().send(message)

    def send_keepalive_ping(self) -> None:
        """Send a ping, later if a thread reads."""
        if self._reading is None:
            super().send_keepalive_ping()
        else:
            self.ping_timer = self.loop.call_later(_AGAIN, self.send_keepalive_ping)

    def keepalive_timeout(self) -> None:
        """Give the client up, unless a thread may be reading its answer."""
        if self._reading is None:
            super().keepalive_timeout()
        else:
            self.pong_timer = self.loop.call_later(_AGAIN, self.keepalive_timeout)

    def shutdown(self) -> None:
        """End the connection, once no thread reads."""
        if self._reading is None:
            super().shutdown()
        else:
            self._reading.add_done_callback(self._shut_down_later)

    def _shut_down_later(self, reading: asyncio.Task[None]) -> None:
        if not self.disconnected:
            self.shutdown()


def _extended(message: Any, data: Any) -> Any:
    """A message with a further frame. A list of short frames would take much more memory."""
    message = message if isinstance(message, bytearray) else bytearray(message)
    message += data
    return message


_CONTROL = frozenset({Opcode.PING, Opcode.PONG, Opcode.CLOSE})
