"""Frames through shared memory."""

from __future__ import annotations

import os
import socket
import threading

from modulm_distributed.ring import Ring
from modulm_distributed.stream import FrameStream
from modulm_distributed.worker_process import _Plans
from modulm_wire import frames


def test_every_reader_has_every_frame_in_order():
    ring = Ring.create(2)
    readers = [Ring(os.dup(ring.descriptors[0]), ring.descriptors[1:]) for _ in range(2)]
    found = [[], []]

    def read(reader):
        while len(found[reader]) < 100:
            found[reader] += [bytes(data) for data in readers[reader].frames(reader)]

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(2)]
    for thread in threads:
        thread.start()
    sent = [bytes([i]) * (i * 37) for i in range(100)]  # far more than lie in it at once
    assert all(map(ring.write, sent))
    for thread in threads:
        thread.join()
    assert found == [sent, sent]


def test_what_is_too_long_leaves_its_place():
    ring = Ring.create(1)
    reader = Ring(os.dup(ring.descriptors[0]), ring.descriptors[1:])
    assert ring.write(b"a" * 1000)
    assert not ring.write(b"b" * (1 << 18))
    ring.wake()
    assert [len(data) for data in reader.frames()] == [1000, 0]
    ring.wake()
    assert list(reader.frames()) == []
    ring.close()


def test_a_reader_that_is_gone_is_not_waited_for():
    ring = Ring.create(1)
    for _ in range(40):
        assert ring.write(b"", alive=lambda: False)
    ring.close()


def test_long_plans_and_calls_have_their_turn_among_plans():
    """Whatever comes before them on the stream without a turn of its own."""
    ring = Ring.create(1)
    reader = Ring(os.dup(ring.descriptors[0]), ring.descriptors[1:])
    ours, theirs = map(FrameStream, socket.socketpair())
    for frame in (["prepare", 1], ["run", b"long"], ["forget", 2], ["function", 3]):
        ours.send(frames.pack(*frame))
    for plan in (b"first", b"", b"", b"last"):
        assert ring.write(plan)
    plans = iter(_Plans(theirs, reader, 0))
    arrived = [[kind, content if kind != "run" else bytes(content)] for kind, content in (
        next(plans) for _ in range(6)
    )]  # fmt: skip
    assert arrived == [
        ["run", b"first"], ["prepare", 1], ["run", b"long"], ["forget", 2], ["function", 3],
        ["run", b"last"],
    ]  # fmt: skip
    for stream in (ours, theirs):
        stream.close()
    ring.close()
