"""Files are decoded in processes that may die, and hurt nobody else."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from tests.media.files import image_file, sound_file, tone, video_file

from modulm.errors import QueueFull, RequestError
from modulm_media.decode import decode
from modulm_media.flags import MediaConfig
from modulm_media.limits import Limits, Undecodable
from modulm_media.messages import MediaSource
from modulm_media.opener import MediaOpener
from modulm_media.values import Processed
from modulm_media.workers import DecodeWorkers

RED = image_file(Image.new("RGB", (6, 4), (200, 0, 0)))


@pytest.fixture(scope="module")
def workers():
    workers = DecodeWorkers(1)
    assert workers.running == 0
    yield workers
    workers.close()
    assert workers.running == 0


def test_values_are_those_of_this_process(workers):
    image = workers.decode("image", RED, {})
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (6, 4), (200, 0, 0))
    data = sound_file(tone(), 16000, "FLAC")
    sound, expected = (
        workers.decode("audio", data, {"rate": 8000}),
        decode("audio", data, {"rate": 8000}),
    )
    assert sound.rate == expected.rate
    assert np.array_equal(sound.samples, expected.samples)
    data = video_file(12)
    video, expected = (
        workers.decode("video", data, {"num_frames": 3}),
        decode("video", data, {"num_frames": 3}),
    )
    assert video.metadata() == expected.metadata()
    assert np.array_equal(video.frames, expected.frames)
    assert workers.running == 1


def test_what_cannot_be_decoded_is_told_and_the_process_goes_on(workers):
    workers.decode("image", RED, {})
    before = set(workers._all)
    with pytest.raises(Undecodable, match="not an image"):
        workers.decode("image", b"nothing", {})
    with pytest.raises(Undecodable, match="at most 10 pixels"):
        workers.decode("image", RED, {}, Limits(pixels=10))
    assert workers.decode("image", RED, {}).size == (6, 4)
    assert set(workers._all) == before


def test_pixels_are_reserved_before_they_are_decoded(workers):
    """By headers alone: the rest of these files is missing, so decoding them is an error. Sound too
    is reserved by its header; what says nothing of its length, or lies, in pieces.
    """
    sizes = []
    noise = np.random.default_rng(0).integers(0, 255, (64, 80, 3), np.uint8)
    image = image_file(Image.fromarray(noise))
    with pytest.raises(Undecodable):
        workers.decode("image", image[: len(image) // 2], {}, Limits(), sizes.append)
    assert sizes == [3 * 64 * 80]
    video = workers.decode("video", video_file(12), {"num_frames": 3}, Limits(), sizes.append)
    assert sizes[1:] == [video.frames.nbytes]
    sizes.clear()
    sound = sound_file(tone(), 16000, "FLAC")
    value = workers.decode("audio", sound, {"rate": 8000}, Limits(), sizes.append)
    assert sizes == [value.samples.nbytes]
    sizes.clear()
    long = sound_file(np.zeros(3 << 18, np.float32), 16000, "WAV")
    silent = long[:40] + (1 << 12).to_bytes(4, "little") + long[44:]  # "I have 1,024 samples"
    for data in (long, silent):
        value = workers.decode("audio", data, {}, Limits(), sizes.append)
        assert value.samples.nbytes <= sum(sizes) <= value.samples.nbytes + (1 << 20)
        sizes.clear()
    before = set(workers._all)

    def full(size):
        raise QueueFull("no room")

    for kind, data in (("image", image), ("video", video_file(12)), ("audio", sound)):
        with pytest.raises(QueueFull, match="no room"):
            workers.decode(kind, data, {}, Limits(), full)
    assert workers.decode("image", RED, {}).size == (6, 4)
    assert set(workers._all) == before


def test_signals_of_the_terminal_are_for_the_server(workers):
    """While it drains, it still decodes for requests that it has accepted."""
    workers.decode("image", RED, {})
    (worker,) = workers._all
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(worker._process.pid, number)
        assert workers.decode("image", RED, {}).size == (6, 4)
    assert workers._all == {worker}


def test_a_process_that_dies_is_replaced(workers):
    workers.decode("image", RED, {})
    (worker,) = workers._all
    os.kill(worker._process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(workers.decode, "image", RED, {})
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(Undecodable, match="the decoder crashes"):
            future.result()
    assert workers.decode("image", RED, {}).size == (6, 4)
    assert workers.running == 1


def wide_png(side):
    """A black square of one bit a pixel, made without its pixels."""
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    pixels = zlib.compress((b"\0" + bytes(side // 8)) * side, 1)
    parts = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


def test_time_and_memory_have_bounds():
    """A process that has half a gigabyte, and half a second for each file but its first."""
    workers = DecodeWorkers(1, seconds=0.5, memory=1 << 29)
    wide = wide_png(16384)
    with pytest.raises(Undecodable, match="memory|Memory"):
        workers.decode("image", wide, {}, Limits(pixels=1 << 30))
    assert workers.decode("image", RED, {}).size == (6, 4)
    (worker,) = workers._all
    os.kill(worker._process.pid, signal.SIGSTOP)
    with pytest.raises(Undecodable, match=r"more than 0.5 s"):
        workers.decode("image", RED, {})
    assert workers.decode("image", RED, {}).size == (6, 4)
    workers.close()


def source(data, **more):
    url = "data:;base64," + base64.b64encode(data).decode()
    return MediaSource(kind="image", field="messages[0].content[0].image_url", url=url, **more)


def test_media_are_named_by_their_content_and_names_belong_to_their_owners(workers):
    opener = MediaOpener(MediaConfig())
    opener.workers = workers
    cache = {}

    def open_(source, owner="one"):
        return asyncio.run(opener.open([source], {}, cache.get, owner))[0]

    first = open_(source(RED, uuid="a"))
    assert first.hash == open_(source(RED)).hash != open_(source(RED + b" ")).hash
    none = np.zeros(0, dtype=np.int64)
    cache[first.hash] = Processed("image", none, none == 0, {})
    assert open_(source(RED)).value is None
    empty = MediaSource(kind="image", field="messages[0].content[0].image_url", uuid="a")
    assert open_(empty).processed is cache[first.hash]
    with pytest.raises(RequestError, match="send its data again") as caught:
        open_(empty, owner="two")
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="must have a url"):
        open_(MediaSource(kind="image", field="messages[0].content[0].image", value=[[1]]))


def test_one_wrong_item_ends_the_request_and_is_named(workers):
    opener = MediaOpener(MediaConfig())
    opener.workers = workers
    with pytest.raises(
        RequestError, match=r"^messages\[0\].content\[0\].image_url: it is not an image"
    ):
        asyncio.run(opener.open([source(RED), source(b"nothing"), source(RED)], {}))
