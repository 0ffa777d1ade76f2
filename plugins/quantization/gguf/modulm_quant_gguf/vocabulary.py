"""Convert the tokenizer of a GGUF file to tokenizer.json, and read its chat template.

`tokenizer.ggml.model` names the kind: "gpt2" (byte pairs), "llama" (SentencePiece's byte pairs),
"t5" (Unigram), "bert" (WordPiece). Sources: docs/gguf.md of ggml; src/llama-vocab.cpp of llama.cpp.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from modulm.contracts.loader import TokenizerFiles
from modulm.errors import CheckpointError
from modulm_quant_gguf.container import Model
from modulm_quant_gguf.splits import SPLITS, Split

__all__ = ["tokenizer_files"]

Table = dict[str, Any]

_NORMAL, _UNKNOWN, _CONTROL, _DEFINED, _UNUSED, _BYTE = range(1, 7)
_BLANK = "\u2581"
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
#: Special tokens with other names in the metadata.
_SPELLED = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
_TEMPLATE = "tokenizer.chat_template"


def tokenizer_files(model: Model) -> TokenizerFiles | None:
    """Return the tokenizer's files, if there are any. Raises CheckpointError for unknown kinds."""
    vocabulary = _Vocabulary(model)
    kind = vocabulary.value("model", None)
    if kind is None:
        return None
    make = _KINDS.get(kind)
    if make is None:
        raise vocabulary.error(
            "model", f"{kind!r} is not supported yet; supported: {', '.join(_KINDS)}"
        )
    table = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "added_tokens": list(vocabulary.added()),
        **make(vocabulary),
    }
    settings: Table = {
        f"{name}_token": token
        for name in _SPECIAL
        if (token := vocabulary.special(name)) is not None
    }
    template = _template(model.metadata)
    if template:
        settings["chat_template"] = template
    return TokenizerFiles(json.dumps(table), settings)


def _template(metadata: Mapping[str, Any]) -> str | Mapping[str, str] | None:
    """Return the chat template, or several by name."""
    usual = metadata.get(_TEMPLATE)
    by_name = {
        key.removeprefix(f"{_TEMPLATE}."): text
        for key, text in metadata.items()
        if key.startswith(f"{_TEMPLATE}.") and isinstance(text, str)
    }
    if not by_name:
        return usual if isinstance(usual, str) else None
    return {"default": usual, **by_name} if isinstance(usual, str) else by_name


class _Vocabulary:
    """Tokens, their types and scores, validated."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def error(self, key: str, what: str) -> CheckpointError:
        """Return an error about a key."""
        return CheckpointError(f"{self.model.path}: tokenizer.ggml.{key}: {what}")

    def value(self, key: str, default: Any) -> Any:
        """Return a value of the metadata."""
        return self.model.metadata.get(f"tokenizer.ggml.{key}", default)

    def texts(self, key: str) -> list[str]:
        """Return a list of strings."""
        texts_of_key = self.value(key, None)
        if not isinstance(texts_of_key, list) or not all(
            isinstance(text, str) for text in texts_of_key
        ):
            raise self.error(key, "must be a list of strings")
        return texts_of_key

    @cached_property
    def tokens(self) -> list[str]:
        tokens_of_file = self.texts("tokens")
        if not tokens_of_file:
            raise self.error("tokens", "empty")
        return tokens_of_file

    @cached_property
    def types(self) -> list[int]:
        return self._per_token("token_type", [_NORMAL] * len(self.tokens))

    @cached_property
    def scores(self) -> list[float]:
        return self._per_token("scores", None)

    def _per_token(self, key: str, default: Any) -> Any:
        values = self.value(key, default)
        if not isinstance(values, list) or len(values) != len(self.tokens):
            raise self.error(key, f"must have a number for each of the {len(self.tokens)} tokens")
        if not all(type(number) in (int, float) for number in values):
            raise self.error(key, "must be numbers")
        return values

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token -> id; of duplicates the first."""
        first_ids: dict[str, int] = {}
        for index, token in enumerate(self.tokens):
            first_ids.setdefault(token, index)
        return first_ids

    def id(self, name: str) -> int | None:
        """Return the id of a special token, if the file has one."""
        index = self.value(f"{_SPELLED.get(name, name)}_token_id", None)
        if index is None:
            return None
        if type(index) is not int or not 0 <= index < len(self.tokens):
            raise self.error(f"{name}_token_id", f"{index!r} is not a token id")
        return index

    def special(self, name: str) -> str | None:
        """Return the text of a special token."""
        index = self.id(name)
        return None if index is None else self.tokens[index]

    def added(self) -> Iterator[Table]:
        """Yield tokens that are matched before tokenization."""
        special_ids = {self.id(name) for name in _SPECIAL}
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            special = kind in (_CONTROL, _UNKNOWN) or index in special_ids
            if (special or kind == _DEFINED) and token and self.ids[token] == index:
                yield {
                    "id": index,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": special,
                }

    def around(self, begins: bool, ends: bool) -> Table | None:
        """Return the template with the tokens added around a text, by default or by the file."""
        settings = (
            ("bos", self.value("add_bos_token", begins)),
            ("eos", self.value("add_eos_token", ends)),
        )
        first, last = [self.special(name) if added is True else None for name, added in settings]
        return None if first is None and last is None else self.template(first, last)

    def template(self, first: str | None, last: str | None, *, types: bool = False) -> Table:
        """Return the template "first A last", for pairs "first A last (first) B last".

        types: B gets type id 1.
        """

        def token(text: str | None, kind: int = 0) -> list[Table]:
            return [] if text is None else [{"SpecialToken": {"id": text, "type_id": kind}}]

        def piece(name: str, kind: int = 0) -> list[Table]:
            return [{"Sequence": {"id": name, "type_id": kind}}]

        second = 1 if types else 0
        pair = [*token(first), *piece("A"), *token(last)]
        pair += [] if types else token(first)
        pair += [*piece("B", second), *token(last, second)]
        used = [text for text in (first, last) if text is not None]
        return {
            "type": "TemplateProcessing",
            "single": [*token(first), *piece("A"), *token(last)],
            "pair": pair,
            "special_tokens": {
                text: {"id": text, "ids": [self.ids[text]], "tokens": [text]} for text in used
            },
        }


def _byte_pairs(v: _Vocabulary) -> Table:
    """GPT-2's byte pairs, where bytes are written as visible characters."""
    name = v.value("pre", "default")
    split = SPLITS.get(name)
    if split is None:
        raise v.error("pre", f"{name!r} is not supported yet; supported: {', '.join(SPLITS)}")
    pairs = []
    for number, merge in enumerate(v.texts("merges")):
        cut = merge.find(" ", 1)
        if cut < 1 or merge[:cut] not in v.ids or merge[cut + 1 :] not in v.ids:
            raise v.error("merges", f"number {number}, {merge!r}, is not a pair of tokens")
        if merge[:cut] + merge[cut + 1 :] not in v.ids:
            raise v.error("merges", f"number {number}, {merge!r}, does not give a token")
        pairs.append([merge[:cut], merge[cut + 1 :]])
    known = {
        token: index
        for token, index in v.ids.items()
        if v.types[index] != _UNUSED or token[0] != "["
    }
    return {
        "normalizer": {"type": "NFC"} if split.composed else None,
        "pre_tokenizer": _cut(split),
        "post_processor": v.around(split.begins, False),
        "decoder": _BYTES,
        "model": _merging(known, pairs, ignore_merges=split.whole),
    }


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _cut(split: Split) -> Table:
    steps: list[Table] = [
        {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
        for one in split.patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*steps, _BYTES]}


def _merging(vocabulary: Mapping[str, int], merges: Sequence[Any], **more: Any) -> Table:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocabulary,
        "merges": merges,
        **more,
    }


def _sentence_pairs(v: _Vocabulary) -> Table:
    """SentencePiece's byte pairs, where the pair with the highest score is merged first."""
    prefixed = v.value("add_space_prefix", True) is not False
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
    before = [{"type": "Prepend", "prepend": _BLANK}] if prefixed else []
    after: list[Table] = [
        {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        after.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = _merging(
        v.ids,
        list(_by_score(v)),
        unk_token=v.special("unk"),
        fuse_unk=True,
        byte_fallback=_BYTE in v.types,
    )
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, blank]},
        "post_processor": v.around(True, False),
        "decoder": {"type": "Sequence", "decoders": after},
        "model": model,
    }


def _by_score(v: _Vocabulary) -> Iterator[list[str]]:
    """Yield pairs of tokens that form a token, best first."""
    known = {token: i for token, i in v.ids.items() if v.types[i] in (_NORMAL, _DEFINED, _UNUSED)}
    scores = v.scores
    pairs = [
        (-scores[index], known[token[:cut]], known[token[cut:]], token, cut)
        for token, index in known.items()
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    for _, _, _, token, cut in sorted(pairs):
        yield [token[:cut], token[cut:]]


def _unigram(v: _Vocabulary) -> Table:
    """Unigram (Kudo, arXiv 1804.10959): pieces with the highest sum of scores."""
    charsmap = v.value("precompiled_charsmap", None)
    steps: list[Table] = []
    if isinstance(charsmap, list) and charsmap:
        raw = base64.b64encode(bytes(int(byte) & 255 for byte in charsmap)).decode("ascii")
        steps.append({"type": "Precompiled", "precompiled_charsmap": raw})
    prefix = "always" if v.value("add_space_prefix", True) is not False else "never"
    space: Table = {"type": "Metaspace", "replacement": _BLANK, "split": True}
    space["prepend_scheme"] = prefix
    cut = space
    if v.value("remove_extra_whitespaces", False) is True:
        cut = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, space]}
    pieces = [[token, float(score)] for token, score in zip(v.tokens, v.scores, strict=True)]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": cut,
        "post_processor": v.around(False, True),
        "decoder": space,
        "model": {
            "type": "Unigram",
            "unk_id": v.id("unk"),
            "vocab": pieces,
            "byte_fallback": False,
        },
    }


def _word_pieces(v: _Vocabulary) -> Table:
    """WordPiece. The file marks word starts; the vocabulary marks continuations."""
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(v.tokens):
        vocabulary.setdefault(_word_piece(token, v.types[index]), index)
    unknown = v.special("unk") or "[UNK]"
    lower = not any(token[:1] == _BLANK and token != token.lower() for token in v.tokens)
    first, last = v.special("cls") or v.special("bos"), v.special("sep") or v.special("eos")
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": lower,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": v.template(first, last, types=True) if first or last else None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocabulary,
        },
    }


def _word_piece(token: str, kind: int) -> str:
    if token.startswith(_BLANK):
        return token[1:]
    marked = kind in (_CONTROL, _UNKNOWN) or (token[:1] == "[" and token[-1:] == "]")
    return token if marked else f"##{token}"


_KINDS: Mapping[str, Callable[[_Vocabulary], Table]] = {
    "gpt2": _byte_pairs,
    "llama": _sentence_pairs,
    "t5": _unigram,
    "bert": _word_pieces,
}
