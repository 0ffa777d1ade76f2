"""Damaged safetensors: each fault is found before a weight is read, and names the file."""

from __future__ import annotations

import json
import struct

import pytest
from safetensors.torch import load_file

from modulm.errors import CheckpointError
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm_tensor_files import safetensors

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}
DATA = bytes(16)


def index(folder):
    return manager.current().load("loaders", "safetensors")(folder).index()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a whole checkpoint."""
    return (make_tiny(tmp_path_factory.mktemp("model")) / "model.safetensors").read_bytes()


def write(folder, header, data=DATA):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_sound_file_is_read(tmp_path):
    write(tmp_path, {"__metadata__": {"format": "pt"}, "b": B, "a": A})
    assert {n: (t.shape, t.dtype, t.bytes) for n, t in index(tmp_path).items()} == {
        "a": ((2,), "float32", 8),
        "b": ((2,), "float32", 8),
    }


WRONG = {
    "overlap": ({"a": A, "b": {**B, "data_offsets": [4, 12]}}, "begins at 4 and overlaps"),
    "twice the same bytes": ({"a": A, "b": A}, "begins at 0 and overlaps"),
    "gap": (
        {"a": A, "b": {**B, "data_offsets": [12, 16], "shape": [1]}},
        "begins at 12 and follows a gap",
    ),
    "beyond the end": ({"a": A, "b": {**B, "data_offsets": [8, 24], "shape": [4]}}, "truncated"),
    "backwards": ({"a": {**A, "data_offsets": [8, 0]}}, "takes 8 bytes, not -8"),
    "negative": ({"a": {**A, "data_offsets": [-8, 0]}}, "a: shape"),
    "three offsets": ({"a": {**A, "data_offsets": [0, 4, 8]}}, "a: bad header entry"),
    "fractions": ({"a": {**A, "shape": [2.0]}}, "a: shape"),
    "a negative shape": ({"a": {**A, "shape": [-2]}}, "a: shape"),
    "truth as a shape": ({"a": {**A, "shape": [True, 2]}}, "a: shape"),
    "a shape that is none": ({"a": {**A, "shape": 2}}, "a: bad header entry"),
    "an absurd shape": ({"a": {**A, "shape": [2**40, 2**40]}}, "a: F32 of shape"),
    "wrong dtype": ({"a": {**A, "dtype": "F16"}}, "a: F16 of shape .* takes 4 bytes, not 8"),
    "no dtype": ({"a": {**A, "dtype": "F31"}}, "a: unknown dtype 'F31'"),
    "a dtype that is none": ({"a": {**A, "dtype": 3}}, "a: unknown dtype 3"),
    "nothing": ({"a": {}}, "a: bad header entry"),
    "no entry": ({"a": None}, "a: bad header entry"),
    "a list": (b"[]", "not a table"),
    "no JSON": (b"{'a': 1}", "header cannot be read"),
    "no text": (b"\xff\xfe{}", "header cannot be read"),
    "doubled": (
        b'{"a": %s, "a": %s}' % (json.dumps(A).encode(), json.dumps(B).encode()),
        "duplicate name a",
    ),
    "more data": ({"a": A}, "8 bytes too many"),
    "deep": (b"[" * 100_000, "header cannot be read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_header_is_named_with_its_file(tmp_path, name):
    header, message = WRONG[name]
    write(tmp_path, header)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        index(tmp_path)


def test_a_header_of_too_many_tensors_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    """A million empty tensors cost half a minute and 2 GB (issue 36)."""
    write(tmp_path, b'"data_offsets"' * (2**18 + 1))
    with pytest.raises(CheckpointError, match="more than 262144 tensors"):
        index(tmp_path)
    monkeypatch.setattr(safetensors, "_MOST_TENSORS", 1)
    escaped = json.dumps({"a": A, "b": B}).replace("data_", "d\\u0061ta_")
    write(tmp_path, escaped.encode())
    with pytest.raises(CheckpointError, match="more than 1 tensors"):
        index(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 2**63 - 1, 2**64 - 1, 10**9, 500])
def test_a_header_that_cannot_be_that_long(tmp_path, length):
    body = json.dumps({"a": A, "b": B}).encode() + DATA
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + body)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*header of {length} bytes"):
        index(tmp_path)


@pytest.mark.parametrize("cut", [0, 7, 8, 100, -1000, -1])
def test_a_truncated_file_is_named(tmp_path, cut, whole):
    (tmp_path / "model.safetensors").write_bytes(whole[:cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        index(tmp_path)


def test_every_flipped_byte_of_a_header_is_an_error_or_another_sound_header(tmp_path):
    """Whatever the damage, what comes out is a table or a CheckpointError."""
    write(tmp_path, {"a": A, "b": B})
    file = tmp_path / "model.safetensors"
    sound = file.read_bytes()
    for offset in range(len(sound) - len(DATA)):
        for bit in (1, 8, 64, 128):
            damaged = bytearray(sound)
            damaged[offset] ^= bit
            file.write_bytes(damaged)
            try:
                assert all(t.bytes == 8 for t in index(tmp_path).values())
            except CheckpointError as error:
                assert "model.safetensors: " in str(error)  # noqa: PT017 - both ways are right


def test_damage_that_appears_after_the_index_was_read_is_named(tmp_path, whole):
    file = tmp_path / "model.safetensors"
    file.write_bytes(whole)
    loader = manager.current().load("loaders", "safetensors")(tmp_path)
    assert set(loader.index()) == set(load_file(file))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        list(loader.read())


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 1}', '{"weight_map": {"a": 1}}'])
def test_a_wrong_index_is_named(tmp_path, text):
    write(tmp_path, {"a": A, "b": B})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map"):
        index(tmp_path)
