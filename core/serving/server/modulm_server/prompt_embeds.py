"""Reads embeddings from clients: tensors written by `torch.save`, in base64.

Such a file is a zip archive with a pickle that describes how to build the tensor from the archive's
members. Nothing is unpickled here: the pickle's operations are parsed and must describe one dense
tensor within the data (see CVE-2025-62164 for sparse tensors and torch.load; torch does not compare
a member's size with the tensor's).
"""

from __future__ import annotations

import base64
import binascii
import io
import pickletools
import re
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

from modulm.contracts.engine_info import EngineInfo
from modulm.contracts.media import MediaItem
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import RequestError
from modulm_frontend.prompt_embeds import embeds_item
from modulm_server.json_body import bad_field

__all__ = ["EmbedsParts", "read_embeds", "refuse_embeds"]

#: Maximum bytes of the pickle, and maximum members of the archive.
_PICKLE, _MEMBERS = 4_096, 32
_TENSOR = "torch._utils _rebuild_tensor_v2"
_STORAGES: dict[str, np.dtype[Any]] = {
    "torch FloatStorage": np.dtype("<f4"),
    "torch HalfStorage": np.dtype("<f2"),
    "torch BFloat16Storage": np.dtype("<u2"),
}
_TABLE = "collections OrderedDict"
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PLAIN = frozenset({"BININT", "BININT1", "BININT2", "BINUNICODE", "LONG1"})
_CONSTANTS = {"NEWFALSE": False, "NEWTRUE": True, "NONE": None}


class _Malformed(Exception):
    """The data is not a supported tensor."""


class _Stored(NamedTuple):
    """A tensor in an archive: the member's name and type, and the tensor's view of it."""

    key: str
    kind: str
    numbers: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def refuse_embeds(info: EngineInfo, param: str) -> None:
    """Raise ApiError(400) if embedding prompts are not enabled."""
    if not info.config.model.enable_prompt_embeds:
        raise bad_field(
            param, "prompt_embeds is not enabled: start the server with --enable-prompt-embeds"
        )


def read_embeds(encoded: Any, info: EngineInfo, param: str, start: int = 0) -> MediaItem:
    """Read a base64 tensor into a prompt item that begins at token `start`.

    Raises ApiError(400) naming `param`.
    """
    if not isinstance(encoded, str):
        raise bad_field(param, f"{param} must be a tensor saved by torch, in base64")
    try:
        data = base64.b64decode(encoded, validate=True)
        stored, raw = _opened(data)
    except (_Malformed, binascii.Error, zipfile.BadZipFile) as error:
        raise bad_field(
            param, f"{param}: not a tensor saved by torch, in base64: {error}"
        ) from error
    except (ValueError, LookupError, TypeError, OverflowError, EOFError, NotImplementedError):
        raise bad_field(param, f"{param}: not a tensor saved by torch, in base64") from None
    rows, width = stored.shape[-2:]
    if width != info.hidden or rows > info.max_model_len:
        raise bad_field(
            param,
            f"{param} must be a tensor of at most {info.max_model_len} tokens by {info.hidden}, "
            f"not {list(stored.shape)}",
        )
    try:
        return embeds_item(_numbers(stored, raw), start, info)
    except RequestError as error:
        raise bad_field(param, error.message) from error


def _opened(data: bytes) -> tuple[_Stored, bytes]:
    """Open the archive; returns (the tensor's description, the bytes of its member)."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {member.filename: member for member in archive.infolist()}
        pickles = [name for name in members if name.endswith("/data.pkl")]
        if len(members) > _MEMBERS or len(pickles) != 1:
            raise _Malformed("the archive does not contain exactly one tensor")
        if any(m.compress_type or m.file_size > len(data) for m in members.values()):
            raise _Malformed("members of the archive must not be compressed")
        root = pickles[0].removesuffix("data.pkl")
        if members[pickles[0]].file_size > _PICKLE:
            raise _Malformed("the archive contains more than a tensor")
        stored = _read_pickle(archive.read(pickles[0]))
        order = f"{root}byteorder"
        if order in members and archive.read(order) != b"little":
            raise _Malformed("its numbers are not little-endian")
        raw = archive.read(f"{root}data/{stored.key}")
    if len(raw) != stored.numbers * _STORAGES[stored.kind].itemsize:
        raise _Malformed("a member's size does not match its tensor")
    return stored, raw


def _read_pickle(data: bytes) -> _Stored:
    """Parse the tensor description in torch's pickle, without unpickling it."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    argument: Any
    for operation, argument, _ in pickletools.genops(data):
        name = operation.name
        if name in _PLAIN:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[len(stack) - count :] = [tuple(stack[len(stack) - count :])]
        elif name == "GLOBAL":
            if argument not in (_TENSOR, _TABLE, *_STORAGES):
                raise _Malformed(
                    f"its pickle refers to {argument[:80]!r}; one dense tensor is expected"
                )
            stack.append(argument)
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            first = marks.pop()
            stack[first:] = [tuple(stack[first:])]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "BINPERSID":
            stack.append(("storage", stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append((stack.pop(), arguments))
        elif name not in ("PROTO", "STOP"):
            raise _Malformed(f"its pickle uses {name}; one dense tensor is expected")
    return _tensor(stack.pop())


def _tensor(value: Any) -> _Stored:
    function, (storage, offset, shape, strides, *_) = value
    (_, (_, kind, key, _, numbers)) = storage
    if function != _TENSOR or kind not in _STORAGES or not re.fullmatch(r"\d{1,9}", key):
        raise _Malformed("one dense tensor of floating-point numbers is expected")
    counts = (offset, numbers, *shape, *strides)
    if any(type(count) is not int or not 0 <= count < 2**40 for count in counts):
        raise _Malformed("its sizes are invalid")
    if len(shape) != len(strides) or len(shape[-2:]) != 2 or any(n != 1 for n in shape[:-2]):
        raise _Malformed("a tensor [tokens, hidden] is expected")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if 0 in shape or last >= numbers or shape[-1] * shape[-2] > numbers:
        raise _Malformed("its sizes do not match its data")
    return _Stored(key, kind, numbers, offset, shape, strides)


def _numbers(stored: _Stored, raw: bytes) -> np.ndarray:
    """[tokens, hidden] float32 or float16."""
    kind = _STORAGES[stored.kind]
    flat = np.frombuffer(raw, dtype=kind)[stored.offset :]
    strides = tuple(step * kind.itemsize for step in stored.strides)
    view = np.lib.stride_tricks.as_strided(flat, stored.shape[-2:], strides[-2:], writeable=False)
    if kind.kind == "f":
        return np.ascontiguousarray(view)
    wide: np.ndarray = (view.astype(np.uint32) << 16).view(np.float32)
    return wide


class EmbedsParts:
    """Message parts of type `prompt_embeds`: replaced by marks for the template, and inserted when
    the rendered prompt is tokenized. Pass `messages` to the template and `encode` to `encode_chat`.
    """

    def __init__(
        self, messages: Sequence[Mapping[str, Any]], info: EngineInfo, tokenizer: Tokenizer
    ) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._payloads: list[Any] = []
        # Private-use characters and a random name, which the messages cannot contain.
        self._name = f"\ue004{uuid4().hex}:"
        self._mark = re.compile(f"({re.escape(self._name)}\\d+\ue005)")
        self.messages = [self._without(message) for message in messages]
        self._items: list[MediaItem] = []
        self._done = 0

    def _without(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return {**message, "content": [self._marked(part) for part in content]}

    def _marked(self, part: Any) -> Any:
        if not _is_embeds(part):
            return part
        self._payloads.append(part.get("data"))
        return {"type": "text", "text": f"{self._name}{len(self._payloads) - 1}\ue005"}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize a piece of the prompt; the ids of embeddings are 0."""
        ids: list[int] = []
        for piece_index, piece in enumerate(self._mark.split(text)):
            if self._mark.fullmatch(piece):
                index = int(piece.removeprefix(self._name)[:-1])
                start = self._done + len(ids)
                item = read_embeds(self._payloads[index], self._info, "messages", start)
                self._items.append(item)
                ids += [0] * item.length
            elif piece:
                special = add_special_tokens and not piece_index
                ids += self._tokenizer.encode(piece, add_special_tokens=special)
        self._done += len(ids)
        return ids

    def items(self) -> tuple[MediaItem, ...]:
        """The embedding items of the prompt. Raises ApiError(400) if the template dropped any."""
        if len(self._items) != len(self._payloads):
            raise bad_field("messages", "messages: the chat template does not render every part")
        return tuple(self._items)

    def without_marks(self, text: str) -> str:
        """Remove the marks from the prompt's text."""
        return self._mark.sub("", text)

    @staticmethod
    def among(messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether messages have parts with embeddings."""
        return any(
            _is_embeds(part)
            for message in messages
            if isinstance(message.get("content"), list)
            for part in message["content"]
        )


def _is_embeds(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "prompt_embeds"
