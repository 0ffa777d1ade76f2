"""Packs tokenized conversations into rows of a fixed length, with attention limited to each."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from .generator import statements, training
from .tokenizer import render

TOKENS = 2048
PICKED = 1024
LENGTHS = (256, 512, 1024)
_CHUNK = 256
_PROMPT_WEIGHT = 0.1
_STATEMENTS = {"first": 0, "second": 6}
_EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Document:
    """Token ids of a conversation; `learned` marks those that the model has to write."""

    ids: list[int]
    learned: list[bool]


@dataclass(frozen=True)
class Batch:
    """`ids`, `positions`, `owners`: [rows, length]. The rest: [PICKED], positions that carry loss.

    A token attends to earlier tokens of its own conversation, which `owners` numbers within a row.
    """

    ids: np.ndarray
    positions: np.ndarray
    owners: np.ndarray
    picked: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def pieces(text: str, thinking: bool) -> list[tuple[str, bool]]:
    """Split a rendered conversation into parts that the model reads and parts that it writes.

    It writes the assistant turns after the last question; the template drops the thoughts of
    earlier turns, so learning from them would teach answers without a think block.
    """
    turns = text.split("<|im_start|>")[1:]
    last_user = max(
        i
        for i, turn in enumerate(turns)
        if turn.startswith("user\n") and not turn.startswith("user\n<tool_response>")
    )
    parts: list[tuple[str, bool]] = []
    for index, turn in enumerate(turns):
        if index < last_user or not turn.startswith("assistant\n"):
            parts.append((f"<|im_start|>{turn}", False))
            continue
        header, written = "assistant\n", turn.removeprefix("assistant\n").removesuffix("\n")
        if not thinking:
            header, written = header + _EMPTY_THOUGHT, written.removeprefix(_EMPTY_THOUGHT)
        parts += [(f"<|im_start|>{header}", False), (written, True), ("\n", False)]
    return parts


def documents(
    tokenizer: PreTrainedTokenizerFast, seed: int, mixture: str = "second"
) -> Iterator[Document]:
    """Tokenize the training conversations of a seed, some hundred at a time."""
    source, stated = training(seed, mixture), statements(seed)
    while True:
        chunk = [next(source) for _ in range(_CHUNK)]
        cut = [pieces(render(tokenizer, e), bool(e.thinking)) for e in chunk]
        picked_statements = itertools.islice(stated, _STATEMENTS[mixture])
        cut += [[(f"{text}{tokenizer.eos_token}", True)] for text in picked_statements]
        encoded = iter(tokenizer([text for parts in cut for text, _ in parts])["input_ids"])
        for parts in cut:
            ids, learned = [], []
            for _, written in parts:
                piece = next(encoded)
                ids += piece
                learned += [written] * len(piece)
            yield Document(ids, learned)


def _pack(waiting: list[Document], length: int) -> tuple[list[list[Document]], list[Document]]:
    """Pack documents into rows, longest first, each into the first row with room."""
    rows: list[list[Document]] = [[] for _ in range(TOKENS // length)]
    room, left = [length] * len(rows), []
    for document in sorted(waiting, key=lambda d: -len(d.ids)):
        fits = next((i for i, free in enumerate(room) if free >= len(document.ids)), None)
        if fits is None:
            left.append(document)
        else:
            rows[fits].append(document)
            room[fits] -= len(document.ids)
    return rows, left


def _assemble(rows: list[list[Document]], length: int, rng: np.random.Generator) -> Batch:
    shape = (len(rows), length)
    ids, positions, owners = (np.zeros(shape, np.int64) for _ in range(3))
    targets, weights = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    for row, members in enumerate(rows):
        start = 0
        for owner, document in enumerate(members, 1):
            end = start + len(document.ids)
            ids[row, start:end], positions[row, start:end] = document.ids, np.arange(end - start)
            owners[row, start:end] = owner
            targets[row, start : end - 1] = document.ids[1:]
            weights[row, start : end - 1] = np.where(document.learned[1:], 1.0, _PROMPT_WEIGHT)
            start = end
    order = np.argsort(-weights.reshape(-1) - rng.random(weights.size) * 0.05)[:PICKED]
    return Batch(ids, positions, owners, order, targets.reshape(-1)[order],
                 weights.reshape(-1)[order])  # fmt: skip


def _take(waiting: dict[int, list[Document]], length: int) -> list[list[Document]]:
    """Fill rows of a length with documents of that length, and the gaps with shorter ones."""
    lengths = [other for other in LENGTHS if other <= length]
    rows, left = _pack([document for other in lengths for document in waiting[other]], length)
    for other in lengths:
        waiting[other] = [document for document in left if row_length(document) == other]
    return rows


def row_length(document: Document) -> int | None:
    """The smallest row length that holds a document, or None if it is too long."""
    return next((length for length in LENGTHS if len(document.ids) <= length), None)


def batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, mixture: str = "second"
) -> Iterator[Batch]:
    """Batches of TOKENS positions in rows no longer than the conversations need."""
    rng = np.random.default_rng(seed)
    waiting: dict[int, list[Document]] = {length: [] for length in LENGTHS}
    for document in documents(tokenizer, seed, mixture):
        length = row_length(document)
        if length is None:
            continue
        waiting[length].append(document)
        if sum(len(d.ids) for d in waiting[length]) >= TOKENS * 5 // 4:
            yield _assemble(_take(waiting, length), length, rng)
