"""Frames through shared memory."""

from __future__ import annotations

import os
import threading

from modulm_distributed.ring import Ring


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
