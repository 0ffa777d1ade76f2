"""Reading JSON and Python while they arrive, against the json module and ast, for every cut."""

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modulm_parsing import NotACall, Source
from modulm_parsing.json_text import read_json, read_members
from modulm_parsing.python_text import literal, read_literal

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=10,
)


def run(reader, pieces):
    """What a reader makes of pieces: (what it emitted, the text it left, whether all was well)."""
    source, emitted = Source(), []
    steps = reader(source, emitted.append)
    well = True
    try:
        for piece in pieces:
            source.push(piece)
            next(steps, None)
        source.final = True
        next(steps, None)
    except NotACall:
        well = False
    return "".join(emitted), source.text[source.at :], well


def cut(text, cuts):
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(json_values, st.data(), st.booleans())
def test_a_value_is_handed_on_as_it_is_written(value, data, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5).map(sorted))
    emitted, _, well = run(read_json, cut(text, cuts))
    assert well
    assert emitted == text


@given(st.dictionaries(st.text(max_size=4), json_values), st.data())
def test_members_are_read_one_by_one(value, data):
    text = json.dumps(value) + " tail"
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5).map(sorted))
    read_object = {}

    def members(source, emit):
        def member(key):
            parts = []
            yield from read_json(source, parts.append)
            read_object[key] = json.loads("".join(parts))

        yield from read_members(source, member)

    source = run(members, cut(text, cuts))
    assert read_object == value
    assert source[2]


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ('"a\nb\tc"', "a\nb\tc"),
        (r'"\d+ \\ \" \'"', "\\d+ \\ \" \\'"),
        (r'"\u00e9\u12"', "é\\u12"),
        ("True", True),
        ("None", None),
    ],
)
def test_what_models_get_wrong_in_strings_is_put_right(text, means):
    for cut_at in range(len(text)):
        emitted, _, well = run(read_json, [text[:cut_at], text[cut_at:]])
        assert well
        assert json.loads(emitted) == means


@pytest.mark.parametrize(
    "text", ["[1]", "{1: 2}", '{"a" 1}', '{"a": 1]', '{"a": [1}}', "{x}", "{:1}"]
)
def test_what_is_not_an_object_is_refused(text):
    def members(source, emit):
        yield from read_members(source, lambda key: read_json(source, emit))

    for cut_at in range(len(text)):
        assert not run(members, [text[:cut_at], text[cut_at:]])[2]


def test_depth_is_bounded():
    assert not run(read_json, ['{"a":' * 50_000])[2]
    assert not run(read_literal, ["[" * 50_000])[2]
    assert literal("[" * 50_000) is None


python_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=10,
)


@given(python_values, st.data())
def test_a_python_literal_becomes_json(value, data):
    text = repr(value) + ","
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5).map(sorted))
    emitted, left, well = run(read_literal, cut(text, cuts))
    assert well
    assert left == ","
    assert json.loads(emitted) == json.loads(json.dumps(value))


@pytest.mark.parametrize(
    "text",
    ["'a' 'b'", '"""a "quoted" b"""', r"r'\d'", "(1, 2)", "1_000", "0x1F", "-.5", "''", "'\\x41'",
     "{'a': (True, None)}", "'it\\'s'"],
)  # fmt: skip
def test_a_literal_means_what_python_says(text):
    converted = literal(text)
    assert converted is not None
    expected = ast.literal_eval(text)
    assert json.loads(converted) == json.loads(json.dumps(expected))


@pytest.mark.parametrize(
    "text", ["__import__('os').system('true')", "[x for x in y]", "1 + 1", "f(1)", "{1: 2}", "a.b"]
)
def test_what_is_no_literal_is_not_evaluated(text):
    assert literal(text) is None
