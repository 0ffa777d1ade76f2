"""Chat templates of DeepSeek V3 and R1, and templates that replace the encodings of V3.2 and later.

V3.2, V4 and V4.1 have no chat template but a Python module that encodes messages. The templates
here do the same and run like all others. That module is parsed for the texts that the model was
trained with (instructions for tools and reasoning efforts) and never executed; without it, texts of
our own are used.

Source: the `encoding` folders of DeepSeek-V3.2, V4 and V4.1, and the earlier chat templates.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from modulm.contracts.tokenizer_loader import TokenizerLoader
from modulm_chat import ChatTemplate
from modulm_tokenizers.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from modulm.contracts.tokenizer import Tokenizer

__all__ = [
    "R1",
    "V3",
    "V4",
    "V31",
    "V32",
    "V41",
    "DeepseekV4Tokenizer",
    "DeepseekV32Tokenizer",
    "DeepseekV41Tokenizer",
    "encoding_texts",
]

_HERE = Path(__file__).parent
#: Maximum size in bytes of an encoding module; DeepSeek's have 30,000.
_MOST = 1 << 20
_FORMATS = {
    "{dsml_token}": "｜DSML｜",
    "{thinking_start_token}": "<think>",
    "{thinking_end_token}": "</think>",
    "{tc_block_name}": " calls",
    "{tool_call_tag_name}": " invoke",
    "{tool_parameter_tag_name}": " parameter",
}
_MAXIMUM = (
    "Reasoning effort: maximal. Think for as long as it takes, question every step, and look at "
    "the problem from several sides before the answer.\n\n"
)
_BUDGET = "Reasoning Effort: {budget} of 100\n\n"
_BUDGETS = {"low": 50, "high": 75, "max": 100}


def _head(**variables: Any) -> str:
    """Return template text that sets variables, from JSON values."""
    lines = (f"{{%- set {name} = {_literal(value)} -%}}" for name, value in variables.items())
    return "".join(lines)


def _literal(value: Any) -> str:
    """Return a value as a Jinja literal: JSON, whose strings Jinja can read."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _template(
    file: str, parser: str, reasoning: str | None = None, **variables: Any
) -> ChatTemplate:
    return ChatTemplate(_HERE / file, _head(**variables), parser, reasoning)


R1 = _template("deepseek_v3.jinja", "deepseek_v3", "deepseek_r1", opens=True)
V3 = _template("deepseek_v3.jinja", "deepseek_v3", opens=False)
V31 = _template("deepseek_v31.jinja", "deepseek_v31", "deepseek_v3")
V32 = _template("deepseek_v32.jinja", "deepseek_v32", "deepseek_v3", tools_text=None)
V4 = _template(
    "deepseek_v4.jinja", "deepseek_v4", "deepseek_v4", gap="", group="tool_calls", system="",
    usual_effort="", efforts={"max": _MAXIMUM}, effort_text="", tools_text=None,
)  # fmt: skip
V41 = _template(
    "deepseek_v4.jinja", "deepseek_v41", "deepseek_v41", gap=" ", group="calls",
    system="<｜System｜>", usual_effort="high", effort_text=_BUDGET, tools_text=None,
    efforts={name: _BUDGET.replace("{budget}", str(n)) for name, n in _BUDGETS.items()},
)  # fmt: skip


class _Encoding(TokenizerLoader):
    """Loads the tokenizer of transformers, with the encoding of one generation as its chat
    template.
    """

    #: Files that are parsed for their texts, and never executed.
    files = ("encoding/*.py",)
    #: `model_type` in config.json.
    model_type: str
    template: ChatTemplate

    @classmethod
    def claims(cls, folder: Path) -> str | None:
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(config, dict) or config.get("model_type") != cls.model_type:
            return None
        return f"model_type {cls.model_type}, which has no chat template"

    @classmethod
    def open(cls, path: str, revision: str | None, trust_remote_code: bool) -> Tokenizer:
        tokenizer = load_tokenizer(path, "hf", revision, trust_remote_code)
        texts = encoding_texts(Path(path))
        head = _head(**cls.variables(texts)) if texts else ""
        source = cls.template.head + head + cls.template.source.removeprefix(cls.template.head)
        return evolve(tokenizer, chat_template=source)

    @classmethod
    def variables(cls, texts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the template's variables that the checkpoint's own texts define."""
        text = texts.get("TOOLS_TEMPLATE") or texts.get("TOOLS_SYSTEM_TEMPLATE")
        return {"tools_text": _filled(text)} if isinstance(text, str) else {}


class DeepseekV32Tokenizer(_Encoding):
    """Results in `<function_results>`; reasoning if `thinking` enables it."""

    name = "deepseek_v32"
    api = 1
    model_type = "deepseek_v32"
    template = V32


class DeepseekV4Tokenizer(_Encoding):
    """Results in the user's turn; reasoning unless `thinking` is false."""

    name = "deepseek_v4"
    api = 1
    model_type = "deepseek_v4"
    template = V4

    @classmethod
    def variables(cls, texts: Mapping[str, Any]) -> Mapping[str, Any]:
        values = dict(super().variables(texts))
        several, one = texts.get("REASONING_EFFORT_PROMPTS"), texts.get("REASONING_EFFORT_MAX")
        if isinstance(several, dict) and all(isinstance(v, str) for v in several.values()):
            values["efforts"] = several
            values["usual_effort"] = str(texts.get("DEFAULT_REASONING_EFFORT") or "")
        elif isinstance(one, str):
            values["efforts"] = {"max": one}
        return values


class DeepseekV41Tokenizer(_Encoding):
    """As V4, with a numeric reasoning effort and tokens around the system prompt."""

    name = "deepseek_v41"
    api = 1
    model_type = "deepseek_v41"
    template = V41

    @classmethod
    def variables(cls, texts: Mapping[str, Any]) -> Mapping[str, Any]:
        values = dict(super().variables(texts))
        text, budgets = (
            texts.get("REASONING_EFFORT_TEMPLATE"),
            texts.get("REASONING_EFFORT_MAPPINGS"),
        )
        if isinstance(text, str):
            known = budgets if isinstance(budgets, dict) else _BUDGETS
            filled = {str(name): text.replace("{budget}", str(n)) for name, n in known.items()}
            values |= {"effort_text": text, "efforts": filled}
            values["usual_effort"] = str(texts.get("DEFAULT_REASONING_EFFORT") or "high")
        return values


def encoding_texts(folder: Path) -> Mapping[str, Any]:
    """Return the strings and tables that the checkpoint's `encoding/*.py` assign to names, without
    executing it.
    """
    texts: dict[str, Any] = {}
    for file in sorted(folder.glob("encoding/*.py")):
        try:
            if file.stat().st_size > _MOST:
                continue
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            target = node.target if isinstance(node, ast.AnnAssign) else target
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if isinstance(target, ast.Name) and value is not None:
                try:
                    texts[target.id] = ast.literal_eval(value)
                except (ValueError, TypeError, RecursionError, MemoryError):
                    continue
    return texts


def _filled(text: str) -> str:
    for name, value in _FORMATS.items():
        text = text.replace(name, value)
    return text
