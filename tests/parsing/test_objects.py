"""ObjectReader against the json module, for every value and every way of cutting."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modulm_parsing import ObjectReader

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=10,
)


def read(pieces):
    reader, members, rest = ObjectReader(), {}, ""
    for piece in pieces:
        if reader.done:
            rest += piece
            continue
        events, rest = reader.feed(piece)
        for event in events:
            text, done = members.get(event.key, ("", False))
            assert not done
            members[event.key] = (text + event.text, event.done)
    return reader, members, rest


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=4), json_values), st.data(), st.booleans())
def test_members_equal_the_json_module(value, data, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only) + " tail"
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=5).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    reader, members, rest = read(pieces)
    assert reader.done
    assert not reader.broken
    assert rest == " tail"
    assert {key: json.loads(text) for key, (text, _) in members.items()} == value
    assert all(done for _, done in members.values())


@pytest.mark.parametrize(
    "text", ["[1]", "{1: 2}", '{"a" 1}', '{"a": 1]', '{"a": [1}', "{x}", "{:1}"]
)
def test_what_is_not_an_object_is_broken(text):
    reader, _, _ = read([text])
    assert reader.broken or not reader.done


def test_depth_is_bounded():
    reader, _, _ = read(['{"a":' * 50_000])
    assert reader.broken
