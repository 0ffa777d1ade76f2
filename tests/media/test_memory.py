"""The bytes of all requests' media have one bound, which keys share."""

from __future__ import annotations

import asyncio
import base64
import io

import numpy as np
import pytest
from PIL import Image

from modulm.errors import QueueFull
from modulm_media.fetch import Budget, Fetcher
from modulm_media.flags import MediaConfig
from modulm_media.memory import MediaMemory, default_limit
from modulm_media.messages import MediaSource
from modulm_media.opener import MediaOpener
from modulm_media.values import Media, Processed


def data_url(data: bytes) -> str:
    return "data:;base64," + base64.b64encode(data).decode()


def test_requests_share_one_budget():
    memory = MediaMemory(100)
    with memory.reserve() as one, memory.reserve() as two:
        one.take(60)
        with pytest.raises(QueueFull, match="max-inflight-media-bytes"):
            two.take(41)
        two.take(40)
        assert memory.used_bytes == 100
    assert memory.used_bytes == 0
    with pytest.raises(QueueFull, match="ended"):
        one.take(1)


def test_a_key_leaves_room_for_others():
    memory = MediaMemory(120)
    with memory.reserve("ann") as ann, memory.reserve("bob") as bob:
        ann.take(60)
        with pytest.raises(QueueFull):
            ann.take(1)
        bob.take(40)
        with pytest.raises(QueueFull):
            bob.take(1)
    assert memory.used_bytes == 0


def test_files_are_reserved_before_they_are_decoded():
    memory = MediaMemory(1000)

    async def get(size):
        with memory.reserve() as held:
            budget = Budget(MediaConfig(), held)
            await Fetcher(MediaConfig()).get(data_url(bytes(size)), "image", budget)
            return memory.used_bytes

    assert asyncio.run(get(1000)) == 1000
    with pytest.raises(QueueFull):
        asyncio.run(get(1001))
    assert memory.used_bytes == 0


def test_pixels_are_reserved_before_they_are_kept():
    file = io.BytesIO()
    Image.new("RGB", (300, 200)).save(file, "PNG")
    source = MediaSource(kind="image", field="messages", url=data_url(file.getvalue()))
    opener = MediaOpener(MediaConfig(max_inflight_media_bytes=100_000))

    async def open_one(kind):
        with opener.memory.reserve() as held:
            return await opener.open([kind], {}, reservation=held)

    try:
        with pytest.raises(QueueFull):
            asyncio.run(open_one(source))
        assert opener.memory.used_bytes == 0
        opener.memory.limit = 200_000
        assert asyncio.run(open_one(source))[0].value.size == (300, 200)
        assert opener.memory.used_bytes == 0
    finally:
        opener.close()


def test_a_prepared_image_gives_its_pixels_back():
    """A request holds what the model reads of its images, not all of their pixels at once."""
    files = []
    for red in range(3):
        file = io.BytesIO()
        Image.new("RGB", (300, 200), (red, 0, 0)).save(file, "PNG")
        files.append(file.getvalue())
    sources = [MediaSource(kind="image", field="messages", url=data_url(file)) for file in files]
    opener = MediaOpener(MediaConfig())
    tokens = np.zeros(2, dtype=np.int64)

    async def prepare(media):
        reds = {"red": np.array([media.value.getpixel((0, 0))[0]])}
        processed = Processed("image", tokens, tokens == 0, reds)
        return Media("image", None, hash=media.hash, processed=processed)

    async def open_all(prepare):
        with opener.memory.reserve() as held:
            opened = await opener.open(sources, {}, reservation=held, prepare=prepare)
            return opened, opener.memory.used_bytes

    try:
        whole, held = asyncio.run(open_all(None))
        encoded = sum(map(len, files))
        assert held == encoded + 3 * 3 * 300 * 200
        prepared, held = asyncio.run(open_all(prepare))
        assert held == encoded
        assert [media.hash for media in prepared] == [media.hash for media in whole]
        assert [media.processed.tensors["red"].item() for media in prepared] == [0, 1, 2]
        assert not any(media.value for media in prepared)
    finally:
        opener.close()


def test_the_default_follows_the_machine(tmp_path):
    table = tmp_path / "meminfo"
    table.write_text("MemTotal: 9 kB\nMemAvailable: 8388608 kB\n")
    assert default_limit(table) == 2 << 30
    table.write_text("MemAvailable: 1 kB\n")
    assert default_limit(table) == 256 << 20
    assert default_limit(tmp_path / "none") == 1 << 30
