"""Pre-tokenizer patterns for byte pairs, by the name in `tokenizer.ggml.pre`.

The patterns are those of the tokenizer.json files that the names stand for, according to
convert_hf_to_gguf.py of llama.cpp (get_vocab_base_pre). Patterns are applied in sequence, each to
the pieces of the previous one.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

__all__ = ["SPLITS", "Split"]


@frozen
class Split:
    """`patterns` whose matches become pieces, and other properties of such tokenizers.

    whole: a piece that is a token is not merged further. composed: text is normalised to NFC.
    begins: a text starts with the BOS token unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    composed: bool = False
    begins: bool = False


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str, letters: str = r"\p{L}+", before: str = r"[^\r\n\p{L}\p{N}]?") -> str:
    """Return the pattern of GPT-4 and similar tokenizers."""
    return rf"{_ENDINGS}|{before}{letters}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cases(digits: str, ending: str, marks: str = r"[\r\n/]*") -> str:
    """Return the pattern of GPT-4o and similar tokenizers, which also splits words at capitals."""
    first = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{ending}"
    second = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{ending}"
    return rf"{first}|{second}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{marks}|{_SPACES}"


_LLAMA3 = Split((_words(r"\p{N}{1,3}"),), whole=True, begins=True)
_CL100K = Split((_words(r"\p{N}{1,3}"),))
_QWEN2 = Split((_words(r"\p{N}"),), composed=True)
_PLAIN = Split((_GPT2,))
_DIGITS = Split((r"\p{N}", _GPT2))
_TEKKEN = Split((_cases(r"\p{N}", ""),), whole=True, begins=True)
_GPT4O = Split((_cases(r"\p{N}{1,3}", f"{_ENDINGS}?"),))
_HAN = "[一-龥ࠀ-一가-퟿]+"
_MARKED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = Split((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _MARKED))
_DEEPSEEK_CODER = Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"))
_DEEPSEEK_LLM = Split(
    (
        r"[\r\n]",
        r"\s?\p{L}+",
        "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        _HAN,
        r"\p{N}+",
    )
)
_FALCON = Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))
_DEFAULT = Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

SPLITS: Mapping[str, Split] = {
    "default": _DEFAULT,
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "jina-v2-es", "jina-v2-de", "jina-es", "jina-de",
         "modern-bert", "exaone4", "mellum"),
        _PLAIN,
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _DIGITS
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    "falcon": _FALCON,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
}  # fmt: skip
