"""Names of blocks, and which of them count as found."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modulm.contracts.executor import Capacity, GroupCapacity
from modulm.contracts.media import DIGEST, EMBEDS, MediaItem
from modulm.contracts.requests import Request
from modulm.contracts.sampling import PoolingParams, SamplingParams
from modulm.engine.kv_cache.manager import Hit, KVCacheManager
from modulm.engine.kv_cache.prefix_index import Chain, PrefixIndex, hasher
from modulm.errors import ConfigError, RequestError

TOKENS = list(range(100, 120))


def capacity(groups, vocabulary: int, max_model_len: int) -> Capacity:
    return Capacity(tuple(GroupCapacity(*group) for group in groups), vocabulary, max_model_len)


def names(size: int = 4, algorithm: str = "sha256", tokens: list[int] = TOKENS, **fields: object):
    request = Request(id="r", prompt=tokens, params=SamplingParams(), **fields)
    chain = Chain(request, size, hasher(algorithm))
    chain.extend(np.array(tokens, dtype=np.int32))
    return chain.names


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "builtin"])
def test_only_full_blocks_are_named_and_the_chain_carries_the_past(algorithm: str) -> None:
    base = names(algorithm=algorithm)
    assert len(base) == 5
    assert len(names(algorithm=algorithm, tokens=TOKENS[:19])) == 4
    assert names(algorithm=algorithm, tokens=TOKENS[:12]) == base[:3]
    changed = names(algorithm=algorithm, tokens=[*TOKENS[:5], 7, *TOKENS[6:]])
    assert changed[0] == base[0]
    assert not set(changed[1:]) & set(base)


def test_salt_adapter_and_media_separate() -> None:
    media = (MediaItem("image", b"cat", start=5, length=2),)
    kinds = [
        names(),
        names(salt="a"),
        names(salt="b"),
        names(adapter="a"),
        names(salt="a", adapter="a"),
        names(media=media),
        names(media=(MediaItem("image", b"dog", start=5, length=2),)),
        names(media=(MediaItem("image", b"cat", start=6, length=2),)),
    ]
    seen = [name for kind in kinds for name in kind[1:]]
    assert len(set(seen)) == len(seen)
    assert names(media=media)[0] == names()[0], "nothing of it lies in the first block"


def test_blocks_before_the_first_token_of_an_adapter_are_the_models_own() -> None:
    """aLoRA. In the block where it begins the place counts: its tokens before are the model's."""
    base, whole = names(), names(adapter="a")
    for first in range(4, 20):
        late = names(adapter="a", adapter_from=first)
        block = first // 4
        assert late[:block] == base[:block]
        assert not set(late[block:]) & {*base, *whole}
        assert not set(late[block:]) & set(names(adapter="b", adapter_from=first))
        assert late[-1] != names(adapter="a", adapter_from=first + (1 if first < 19 else -1))[-1]
    assert names(adapter="a", adapter_from=0) == whole


def test_embeddings_name_blocks_by_what_lies_in_them() -> None:
    def embedded(letters: str, start: int = 0) -> list[bytes]:
        hashes = b"".join(letter.encode() * DIGEST for letter in letters)
        item = MediaItem(EMBEDS, hashes, start, len(letters))
        return names(tokens=[0] * 12, media=(item,))

    whole = embedded("abcdefghijkl")
    assert len(set(whole)) == 3
    assert not set(whole) & set(names(tokens=[0] * 12)), "tokens of id 0 are no embeddings"
    assert embedded("abcdefghijkX")[:2] == whole[:2]
    assert embedded("abcdefghijkX")[2] != whole[2]
    assert not set(embedded("Xbcdefghijkl")) & set(whole), "the chain carries the past"
    assert embedded("abcdefgh")[:2] == whole[:2]
    assert embedded("abcdefgh")[2] not in whole
    shifted = embedded("abcdefghijk", 1)
    assert not set(shifted) & set(whole)
    assert embedded("abcd", 4)[0] == names(tokens=[0] * 12)[0]


def test_cbor_is_what_the_format_says() -> None:
    tokens = np.array([1, 23, 24, 255, 256, 70000], dtype=np.int32)
    expected = bytes.fromhex("83 42 7061 86 01 17 1818 18ff 190100 1a00011170 40")
    assert hasher("sha256_cbor")(b"pa", tokens.tobytes(), b"") == hashlib.sha256(expected).digest()


def test_unknown_and_missing_algorithms_are_errors() -> None:
    with pytest.raises(ConfigError, match="sha256_cbor"):
        hasher("md5")


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 5))
def test_trailing_is_the_longest_prefix_a_window_can_use(present: list[bool], need: int) -> None:
    index = PrefixIndex()
    keys = [bytes([i]) for i in range(len(present))]
    for block, (key, there) in enumerate(zip(keys, present, strict=True), start=1):
        if there:
            index.add(key, block)
    usable = [n for n in range(len(keys) + 1) if all(present[max(0, n - need) : n])]
    assert index.trailing(keys, need) == max(usable)
    leading = next((i for i, there in enumerate(present) if not there), len(present))
    assert len(index.leading(keys)) == leading


def test_first_block_with_a_content_is_kept() -> None:
    index = PrefixIndex()
    assert index.add(b"x", 3)
    assert not index.add(b"x", 4)
    assert index.leading([b"x"]) == [3]
    index.forget(3)
    assert index.leading([b"x"]) == []


def test_requests_that_need_every_position_read_no_prefix() -> None:
    def reads(params: object) -> bool:
        return Request(id="r", prompt=[1], params=params).reads_prefix

    assert reads(SamplingParams())
    assert not reads(SamplingParams(prompt_logprobs=0))
    assert not reads(PoolingParams())


def test_groups_agree_on_one_length() -> None:
    """A window of 5 over blocks of 4 sees one block before; the full group sees all of them."""
    groups = KVCacheManager(
        capacity((("attention", 4, None, 9), ("attention", 4, 5, 9)), 10, 40), 2
    )
    chain = {4: [b"a", b"b", b"c", b"d"]}
    full, window = groups.groups
    full.adopt(0, full.pool.take(4))
    full.register(0, chain[4], 0)
    assert groups.lookup(chain, 16).tokens == 0
    window.adopt(0, window.pool.take(4))
    window.register(0, chain[4], 0)
    assert groups.lookup(chain, 16).tokens == 16
    assert groups.lookup(chain, 15).tokens == 12
    window.index.forget(window.tables[0, 3])
    hit = groups.lookup(chain, 16)
    assert hit.tokens == 12
    assert hit.blocks[1] == [0, 0, int(window.tables[0, 2])]


def test_a_state_group_disables_reuse_and_holds_one_slot_per_row() -> None:
    groups = KVCacheManager(
        capacity((("attention", 4, None, 9), ("state", 40, None, 3)), 10, 40), 4
    )
    assert not groups.reusable
    nothing = groups.lookup({}, 0)
    assert groups.admit(0, nothing, 9, 9, 0.0)
    assert groups.admit(1, nothing, 3, 3, 0.0)
    assert not groups.admit(2, nothing, 3, 3, 0.0), "both slots are taken"
    assert groups.grow(np.array([0]), np.array([12]))
    state = groups.groups[1]
    assert state.block_counts.tolist() == [1, 1, 0, 0]
    for one, other in pairwise(state.tables[:2, 0].tolist()):
        assert one != other
    groups.release(0)
    assert groups.admit(2, nothing, 3, 3, 0.0)


SEGMENT = 64


def kept_states(blocks: int, rows: int = 3, size: int = SEGMENT) -> KVCacheManager:
    """Full attention in blocks of 32 beside states that are kept every `size` tokens."""
    groups = (("attention", 32, None, 99), ("state", size, None, blocks))
    return KVCacheManager(capacity(groups, 10, 640), rows)


def test_runs_that_are_looked_at_begin_with_blocks() -> None:
    seen = ((1, 5), (2, 3), (9, 4))
    media = [MediaItem("image", b"x", 0, n, {}, cross=True, seen=at) for at, n in seen]
    request = Request(id="r", prompt=[1] * 12, params=SamplingParams(), media=tuple(media))
    assert request.crossed == (8, 4)
    groups = (("attention", 4, None, 9), ("cross", 6, 18, 9))
    manager = KVCacheManager(capacity(groups, 10, 40), 2)
    manager.check_crossed(())
    manager.check_crossed(request.crossed)
    assert manager.admit(0, Hit(0, ([], [])), 12, 12, 0.0, request.crossed)
    # Two blocks for the first eight, and one for the others.
    assert np.count_nonzero(manager.groups[1].tables[0]) == 3
    with pytest.raises(RequestError, match="13 tokens: at most 18"):
        manager.check_crossed((1, 1, 11))


def test_the_state_of_a_length_is_found_when_all_before_it_are_gone() -> None:
    groups = kept_states(20)
    names = {32: [bytes([i]) for i in range(8)], 64: [bytes([64 + i]) for i in range(4)]}
    rows = np.array([0])
    assert groups.reusable
    assert groups.admit(0, Hit(0, ([], [])), 200, 200, 0.0)
    attention, state = groups.groups
    table = state.tables[0].tolist()
    assert table[4:] == [0] * 6
    assert len(set(table[:4])) == 4
    groups.register(0, 32, names[32][:6], 0)
    groups.register(0, 64, names[64][:3], 0)
    groups.passed(rows, np.array([200]))
    groups.trim(rows, np.array([200]))
    assert state.tables[0, :3].tolist() == [0, 0, 0], "only the running state is held"
    assert groups.lookup(names, 255).tokens == 192
    assert groups.lookup(names, 191).tokens == 128
    hit = groups.lookup(names, 130)
    assert hit == Hit(128, (attention.tables[0, :4].tolist(), [0, table[1]]))
    assert groups.admit(1, hit, 140, 140, 0.0)
    assert state.tables[1, 1] == table[1]
    assert state.tables[1, 2] not in (0, *table), "a state that others may read is not written"


def test_a_state_that_part_of_a_segment_led_to_is_not_found() -> None:
    groups = kept_states(20)
    names = {32: [bytes([i]) for i in range(8)], 64: [bytes([64 + i]) for i in range(4)]}
    rows = np.array([0])
    assert groups.admit(0, Hit(0, ([], [])), 200, 70, 0.0)
    groups.register(0, 64, names[64][:1], 0)
    groups.passed(rows, np.array([70]))
    assert groups.grow(rows, np.array([128]))
    groups.register(0, 32, names[32][:4], 0)
    groups.register(0, 64, names[64][1:2], 1)
    assert groups.lookup(names, 200).tokens == 64


def test_states_on_the_way_give_way_to_rows() -> None:
    """Half of the pool stays free of them; a step needs one slot, however far it goes."""
    groups = kept_states(7, rows=4)
    assert groups.admit(0, Hit(0, ([], [])), 640, 640, 0.0)
    state = groups.groups[1]
    assert (state.tables[0] != 0).sum() == 3
    assert state.tables[0, 9] != 0
    for row in (1, 2, 3):
        assert groups.admit(row, Hit(0, ([], [])), 640, 640, 0.0)
        assert state.tables[row, 9] != 0
        assert (state.tables[row] != 0).sum() == 1
