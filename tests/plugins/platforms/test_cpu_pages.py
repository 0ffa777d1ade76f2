"""Pages of caches are provided ahead of their use: a few, and only while no step writes."""

from __future__ import annotations

import mmap

import pytest
import torch

from modulm_platform_cpu import ahead, memory

PAGE = 2 << 20


@pytest.fixture
def provided():
    return []


@pytest.fixture
def pages(provided, monkeypatch):
    """An `Ahead` that runs no thread and reports what it would provide."""
    monkeypatch.setattr(ahead.threading.Thread, "start", lambda self: None)

    def populate(address, size):
        provided.append((address, size))
        return True

    return ahead.Ahead(populate)


def settle(pages):
    while pages.step():
        pass


def area_of(size):
    area = mmap.mmap(-1, size)
    return area, torch.frombuffer(area, dtype=torch.uint8)


def test_a_share_is_provided_and_then_what_follows_the_written_pages(pages, provided):
    area, tensor = area_of(32 * PAGE)
    pages.add(area, 0, len(area))
    settle(pages)
    assert provided == [(page * PAGE, PAGE) for page in range(4)]  # an eighth
    tensor[PAGE + 256 * 1024] = 1  # the null block in front is never written to
    assert not pages.step()  # a step is writing
    settle(pages)
    assert provided[4:] == [(4 * PAGE, PAGE), (5 * PAGE, PAGE)]


def test_caches_take_turns(pages, provided):
    areas = [area_of(16 * PAGE) for _ in range(2)]
    for number, (area, _) in enumerate(areas):
        pages.add(area, number << 40, len(area))
    settle(pages)
    assert [address >> 40 for address, _ in provided] == [0, 1, 0, 1]


def test_at_most_8_mb_and_never_past_the_end(pages, provided):
    area, tensor = area_of(33 * PAGE + 4096)
    pages.add(area, 0, len(area))
    settle(pages)
    assert len(provided) == 4
    tensor[:: 128 * 1024] = 1  # past what was provided: these are caught up with
    assert not pages.step()
    settle(pages)
    assert provided == [(page * PAGE, PAGE) for page in range(33)]


def test_small_caches_are_left_alone(pages):
    area, _ = area_of(7 * PAGE)
    pages.add(area, 0, len(area))
    assert not pages.step()
    assert pages._thread is None


def test_freed_caches_are_forgotten(pages, provided):
    area, tensor = area_of(16 * PAGE)
    pages.add(area, 0, len(area))
    del area, tensor
    assert not pages.step()
    assert not provided
    assert not pages._areas


def test_a_system_that_cannot_provide_pages_is_asked_once(monkeypatch):
    monkeypatch.setattr(ahead.threading.Thread, "start", lambda self: None)
    asked = []
    pages = ahead.Ahead(lambda address, size: asked.append(address))
    area, _ = area_of(16 * PAGE)
    pages.add(area, 0, len(area))
    settle(pages)
    assert asked == [0]
    assert not pages._areas


def test_the_thread_ends_with_the_last_cache(monkeypatch):
    monkeypatch.setattr(ahead, "_SECONDS", 0)
    pages = ahead.Ahead(lambda address, size: True)
    area, tensor = area_of(16 * PAGE)
    pages.add(area, 0, len(area))
    thread = pages._thread
    del area, tensor
    thread.join()
    assert pages._thread is None


def test_lazy_zeros_are_registered_and_populate_keeps_them_zero(monkeypatch):
    added = []
    monkeypatch.setattr(memory, "keep_ahead", lambda *given: added.append(given[1:]))
    zeros = memory.lazy_zeros(PAGE)
    assert added == [(zeros.data_ptr(), PAGE)]
    assert ahead.populate(zeros.data_ptr(), PAGE) in (True, False)
    assert not zeros.any()
