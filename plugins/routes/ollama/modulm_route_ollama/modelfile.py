"""Modelfiles: Ollama's description of a model, and the settings of modulm that it means.

Source: https://github.com/ollama/ollama/blob/main/docs/modelfile.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import define, field

from modulm_route_ollama.go_template import TemplateError, to_jinja
from modulm_server.json_body import bad_field

__all__ = [
    "Modelfile",
    "parameter_lines",
    "parameters_of",
    "read_modelfile",
    "settings_of",
    "written",
]

_COMMANDS = ("FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "LICENSE", "MESSAGE", "REQUIRES",
             "RENDERER", "PARSER")  # fmt: skip
_LINE = re.compile(r"[ \t]*([A-Za-z]+)[ \t]+(.*)", re.DOTALL)
_QUOTES = '"""'
#: Parameter -> name in --override-generation-config.
_GENERATION = {
    "temperature": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "repeat_penalty": ("repetition_penalty", float),
    "num_predict": ("max_new_tokens", int),
}
#: Parameter -> flag.
_FLAGS = {"num_ctx": ("max_model_len", int), "seed": ("seed", int)}
#: Parameters of the process that runs a model in Ollama.
_IGNORED = frozenset(
    {"num_gpu", "main_gpu", "num_thread", "num_batch", "num_keep", "numa", "low_vram", "f16_kv",
     "use_mmap", "use_mlock", "penalize_newline", "num_gqa", "logits_all", "vocab_only"}
)  # fmt: skip
#: Types of `quantize` -> quantization method.
_ROUNDED = {"q8_0": "int8", "q4_0": "int4", "q4_1": "int4", "q4_k_m": "int4", "q4_k_s": "int4"}


@define(kw_only=True)
class Modelfile:
    """What a model is made of. base: name of a model. parameters: with a list of each one's values.
    ignored: parameters and commands without effect.
    """

    base: str | None = None
    system: str | None = None
    template: str | None = None
    parameters: dict[str, list[Any]] = field(factory=dict)
    adapter: str | None = None
    license: list[str] = field(factory=list)
    quantize: str | None = None
    ignored: list[str] = field(factory=list)


def read_modelfile(text: str) -> Modelfile:
    """Parse a Modelfile. Raises ApiError(400) naming the line."""
    read = Modelfile()
    for number, command, value in _commands(text):
        match command:
            case "FROM":
                read.base = value
            case "SYSTEM":
                read.system = value
            case "TEMPLATE":
                read.template = value
            case "ADAPTER":
                read.adapter = value
            case "LICENSE":
                read.license.append(value)
            case "PARAMETER":
                name, _, setting = value.partition(" ")
                if not setting.strip():
                    raise bad_field("modelfile", f"line {number}: PARAMETER needs NAME VALUE")
                read.parameters.setdefault(name.lower(), []).append(_unquoted(setting.strip()))
            case "MESSAGE":
                raise bad_field("modelfile", f"line {number}: {_MESSAGES}")
            case _:
                read.ignored.append(command)
    return read


_MESSAGES = (
    "MESSAGE is not supported: send the messages with each request, or describe them in SYSTEM"
)


def _commands(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, command and value of each command."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line, number = lines[at], at + 1
        at += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or match[1].upper() not in _COMMANDS:
            known = ", ".join(_COMMANDS)
            raise bad_field("modelfile", f"line {number}: {line[:60]!r} is none of {known}")
        command, value = match[1].upper(), match[2].strip()
        if (opening := value.find(_QUOTES)) >= 0 and value.count(_QUOTES) % 2:
            block = [value]
            while at < len(lines) and _QUOTES not in lines[at]:
                block.append(lines[at])
                at += 1
            if at == len(lines):
                raise bad_field("modelfile", f"line {number}: the text after {_QUOTES} has no end")
            value = "\n".join([*block, lines[at]])
            at += 1
        if opening >= 0:
            head, _, rest = value.partition(_QUOTES)
            value = head + rest.rpartition(_QUOTES)[0]
        else:
            value = _unquoted(value)
        yield number, command, value


def _unquoted(value: str) -> str:
    quoted = len(value) > 1 and value[0] == value[-1] == '"'
    return value[1:-1] if quoted else value


def settings_of(read: Modelfile) -> tuple[dict[str, Any], str | None]:
    """The settings of `modulm.yaml` apart from its files, and the chat template in Jinja.

    Adds to `ignored`. Raises ApiError(400) naming the parameter.
    """
    settings: dict[str, Any] = {}
    generation: dict[str, Any] = {}
    for name, values in read.parameters.items():
        if name == "stop":
            settings["default-stop"] = [str(value) for value in values]
        elif name in _GENERATION:
            theirs, kind = _GENERATION[name]
            number = _number(name, values[-1], kind)
            if name != "num_predict" or number >= 0:
                generation[theirs] = number
        elif name in _FLAGS:
            theirs, kind = _FLAGS[name]
            settings[theirs.replace("_", "-")] = _number(name, values[-1], kind)
        elif name in _IGNORED:
            read.ignored.append(f"PARAMETER {name}")
        else:
            known = ", ".join((*_GENERATION, *_FLAGS, "stop"))
            raise bad_field(
                "parameters",
                f"PARAMETER {name} is not supported: it may be {known}; send it with each request",
            )
    if generation:
        settings["override-generation-config"] = generation
    if read.system:
        settings["system-prompt"] = read.system
    if read.quantize:
        method = _ROUNDED.get(read.quantize.lower())
        if method is None:
            raise bad_field("quantize", f"quantize must be one of {', '.join(_ROUNDED)}")
        settings["quantization"] = method
    return settings, _template(read.template)


def _template(text: str | None) -> str | None:
    if not text:
        return None
    try:
        return text if "{%" in text else to_jinja(text)
    except TemplateError as error:
        raise bad_field(
            "template", f"TEMPLATE: {error}; leave it out for the model's own, or write it in Jinja"
        ) from error


def _number(name: str, value: Any, kind: type[float]) -> Any:
    try:
        if isinstance(value, bool):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError):
        what = "an integer" if kind is int else "a number"
        raise bad_field(
            "parameters", f"PARAMETER {name} must be {what}, not {value!r:.40}"
        ) from None


def parameters_of(table: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The `parameters` of a request, as a Modelfile's."""
    return {
        str(name).lower(): list(value) if isinstance(value, list | tuple) else [value]
        for name, value in table.items()
    }


def written(read: Modelfile, base: str) -> str:
    """Write a Modelfile, as /api/show returns it."""
    lines = [f"FROM {base}"]
    if read.adapter:
        lines.append(f"ADAPTER {read.adapter}")
    lines += _block("TEMPLATE", read.template) + _block("SYSTEM", read.system)
    for name, values in read.parameters.items():
        lines += [f"PARAMETER {name} {_setting(value)}" for value in values]
    for text in read.license:
        lines += _block("LICENSE", text)
    return "\n".join(lines) + "\n"


def _block(command: str, text: str | None) -> list[str]:
    return [f"{command} {_QUOTES}{text}{_QUOTES}"] if text else []


def _setting(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def parameter_lines(parameters: Mapping[str, Iterable[Any]]) -> str:
    """`parameters` of /api/show."""
    return "\n".join(
        f"{name} {_setting(value)}" for name, values in parameters.items() for value in values
    )
