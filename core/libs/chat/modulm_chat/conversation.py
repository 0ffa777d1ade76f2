"""Messages to the text of a prompt, through the checkpoint's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import nodes

from modulm.errors import ConfigError, PluginNotFound, RequestError
from modulm.plugins import manager
from modulm_chat.media import MediaPart
from modulm_chat.named import named_template, template_name
from modulm_chat.templates import (
    MAX_TEMPLATE,
    TemplateFailed,
    check_template,
    execute,
    parse_template,
)
from modulm_chat.thoughts import NAMES, place_thoughts, take_thought

if TYPE_CHECKING:
    from collections.abc import Callable

    from modulm.contracts.tokenizer import Tokenizer

__all__ = [
    "ContentFormat",
    "choose_template",
    "content_format",
    "encode_chat",
    "load_template",
    "normalise",
    "render",
]

ContentFormat = Literal["string", "openai"]

#: Names that a request must not set: what render passes itself, and what transformers takes for
#: arguments of the tokenizer.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
#: A role that newer templates name; to others its messages are the system's.
_DEVELOPER = "developer"
#: Stands inside of what would be a special token; private letters that nobody writes.
_SEAM = "\ue002\ue003"
#: Roles whose text comes from outside of the application that made the request.
_STRANGERS = frozenset({"user", "tool", "function", "query", "document"})
#: Stands at the end of the message that is to be continued. Whether its space survives tells
#: whether the template trims messages.
_MARK = "\ue000the-text-goes-on-here\ue001 "


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    content: ContentFormat | Literal["auto"] = "auto",
    kwargs: Mapping[str, Any] | None = None,
    run: Callable[[str, Mapping[str, Any]], str] = execute,
    form: Callable[[str], ContentFormat] | None = None,
) -> str:
    """The prompt that `messages` make.

    template: source to use instead of the tokenizer's own. content: how the template wants the
    content of a message, a string or OpenAI's list of parts. kwargs: more variables for the
    template (`chat_template_kwargs`). run, form: what executes the template and what finds out
    which content it wants; one that comes from a client is read in a process of its own. Raises
    RequestError naming the field to blame.
    """
    extra = dict(kwargs or {})
    _check_options(extra, add_generation_prompt, continue_final_message)
    if tokenizer.chat is not None:
        return _encoded(
            messages,
            tokenizer,
            tools=tools,
            documents=documents,
            template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=extra,
        )[1]
    source = template or choose_template(tokenizer, tools)
    wanted = (form or content_format)(source) if content == "auto" else content
    conversation = normalise(messages, wanted)
    place_thoughts(conversation, source)
    if _DEVELOPER not in source:
        conversation = _without_developers(conversation)
    if continue_final_message:
        _mark_last(conversation)
    variables = {
        **tokenizer.special,
        **extra,
        "messages": conversation,
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "documents": None if documents is None else [dict(entry) for entry in documents],
        "add_generation_prompt": add_generation_prompt,
    }
    text = run(source, variables)
    return _cut_at_mark(text) if continue_final_message else text


def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    tokenizer: Tokenizer,
    add_special_tokens: bool = False,
    encode: Callable[..., list[int]] | None = None,
    **options: Any,
) -> tuple[list[int], str]:
    """The prompt that `messages` make, as token ids and as text; `options` are those of `render`,
    `encode` is used in place of the tokenizer's, piece by piece from the first to the last.

    What users and tools say cannot become control tokens: it is tokenized as text. The template
    writes the tokens that begin a prompt; `add_special_tokens` is for one that does not. A
    tokenizer that encodes conversations itself does all of it.
    """
    if tokenizer.chat is not None:
        return _encoded(messages, tokenizer, embedded=encode is not None, **options)
    sealed = _seal(messages, tokenizer.special_tokens)
    first, *others = _pieces(render(sealed, tokenizer=tokenizer, **options))
    encode = encode or tokenizer.encode
    ids = list(encode(first, add_special_tokens=add_special_tokens))
    for piece in others:
        ids += encode(piece, add_special_tokens=False)
    return ids, "".join([first, *others])


def _encoded(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    embedded: bool = False,
    run: Callable[[str, Mapping[str, Any]], str] | None = None,
    content: str = "auto",
    form: object = None,
) -> tuple[list[int], str]:
    """What the tokenizer itself makes of a conversation; it has no use for how templates are run.

    Raises RequestError for what its format does not have.
    """
    extra = dict(kwargs or {})
    _check_options(extra, add_generation_prompt, continue_final_message)
    for given, name in ((template, "chat_template"), (documents, "documents")):
        if given:
            raise RequestError(
                f"{name}: this model's tokenizer encodes messages itself, without a template", name
            )
    if embedded:
        raise RequestError("messages: embeddings cannot stand in this model's messages", "messages")
    if tokenizer.chat is None:
        raise RequestError("this tokenizer encodes no messages", "messages")
    return tokenizer.chat.encode(
        normalise(messages, "string"),
        tools=tools or (),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=extra,
    )


def _check_options(
    extra: Mapping[str, Any], add_generation_prompt: bool, continue_final_message: bool
) -> None:
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: the first goes "
            "on with the last message, the second begins a new one",
            "continue_final_message",
        )
    for key in extra:
        if key in _RESERVED or not key.isidentifier():
            raise RequestError(
                f"chat_template_kwargs: {key[:64]!r} is not a variable that a request may give "
                "to the template",
                "chat_template_kwargs",
            )


def choose_template(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """The tokenizer's template; of several, `tool_use` where tools are given, else `default`."""
    held = tokenizer.chat_template
    if isinstance(held, Mapping):
        held = (held.get("tool_use") if tools else None) or held.get("default")
    if not held:
        raise RequestError(
            "this model's tokenizer has no chat template; start the server with --chat-template "
            "or send a prompt to /v1/completions",
            "messages",
        )
    return held


def load_template(value: str) -> str:
    """The source that `--chat-template` means: a file, a name, or the template itself.

    Raises ConfigError if it is none of them, or does not compile.
    """
    source = value
    if not any(mark in value for mark in ("{{", "{%", "\n")):
        source = _named(value) if not Path(value).exists() else _of_file(Path(value))
    try:
        check_template(source)
    except TemplateFailed as error:
        raise ConfigError("chat_template", f"{value[:200]}: {error.message}") from error
    return source


def _of_file(file: Path) -> str:
    try:
        if file.stat().st_size > 4 * MAX_TEMPLATE:
            raise ConfigError("chat_template", f"{file} is too large for a template")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("chat_template", f"{file} cannot be read: {error}") from error


def _named(value: str) -> str:
    plugins = manager.current()
    name = template_name(value)
    try:
        return named_template(plugins, name).source
    except PluginNotFound as error:
        known = sorted({declared.name for declared in plugins.names("chat_templates")})
        close = get_close_matches(name, known, n=3)
        meant = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(
            "chat_template",
            f"{value!r} is neither a readable file nor a Jinja template nor one of the installed "
            f"templates{meant} (`modulm plugins list chat_templates` lists them)",
        ) from error


@lru_cache(maxsize=32)
def content_format(source: str) -> ContentFormat:
    """How a template wants message contents: `openai` if it loops over them, else `string`."""
    tree = parse_template(source)
    holders = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, frozenset())
    }
    names = frozenset(holders)
    loops = any(_is_content(node.iter, names) for node in tree.find_all(nodes.For))
    return "openai" if loops else "string"


def _is_content(node: nodes.Node | None, holders: frozenset[str]) -> bool:
    """Whether an expression is the content of a message, perhaps filtered."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _is_content(node.node, holders)
    if isinstance(node, nodes.Name):
        return node.name in holders
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False


def normalise(
    messages: Sequence[Mapping[str, Any]], content: ContentFormat
) -> list[dict[str, Any]]:
    """Messages as templates expect them: one kind of content, arguments of calls as objects.

    Gives fresh values. Raises RequestError(param="messages").
    """
    if not messages:
        raise RequestError("messages: at least one message is needed", "messages")
    return [_message(index, message, content) for index, message in enumerate(messages)]


def _without_developers(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Developers' messages as the system's; one behind a system message becomes part of it, as
    many templates know one system message, in front."""
    fresh: list[dict[str, Any]] = []
    for message in conversation:
        if message["role"] != _DEVELOPER:
            fresh.append(message)
        elif fresh and fresh[-1]["role"] == "system":
            fresh[-1]["content"] = _joined(fresh[-1]["content"], message["content"])
        else:
            fresh.append({**message, "role": "system"})
    return fresh


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, str):
        return f"{first}\n\n{second}"
    return [*first, {"type": "text", "text": "\n\n"}, *second]


def _seal(
    messages: Sequence[Mapping[str, Any]], special: Sequence[str]
) -> Sequence[Mapping[str, Any]]:
    """Messages in which what users and tools say cannot become control tokens.

    A seam is put into every special token that is written out in their text; `_pieces` cuts the
    rendered prompt there, so that no piece holds one. `special`: the texts of special tokens.
    """
    pattern = _any_of(tuple(special))
    return [
        {**message, "content": _sealed(message.get("content"), pattern)}
        if isinstance(message, Mapping) and _stranger(message.get("role"))
        else message
        for message in messages
    ]


def _stranger(role: Any) -> bool:
    return isinstance(role, str) and role in _STRANGERS


def _pieces(text: str) -> list[str]:
    """A prompt rendered from sealed messages, cut at its seams; joined, they are the prompt."""
    return text.split(_SEAM)


@lru_cache(maxsize=8)
def _any_of(special: tuple[str, ...]) -> re.Pattern[str]:
    words = [re.escape(word) for word in special if len(word) > 1]
    return re.compile("|".join(words) if words else r"(?!)")


def _sealed(content: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(content, str):
        return pattern.sub(lambda found: found[0][0] + _SEAM + found[0][1:], content)
    if isinstance(content, MediaPart):
        return content
    if isinstance(content, Mapping):
        return {key: _sealed(value, pattern) for key, value in content.items()}
    if isinstance(content, Sequence):
        return [_sealed(part, pattern) for part in content]
    return content


def _message(index: int, message: Mapping[str, Any], wanted: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}]: an object with a role is expected", "messages")
    fresh = {key: value for key, value in message.items() if value is not None}
    content, thought = take_thought(index, message)
    fresh["content"] = _content(index, content, wanted)
    if fresh.get("tool_calls"):
        if not isinstance(fresh["tool_calls"], (list, tuple)):
            raise RequestError(f"messages[{index}].tool_calls: a list is expected", "messages")
        fresh["tool_calls"] = [_call(index, call) for call in fresh["tool_calls"]]
    else:
        fresh.pop("tool_calls", None)
    if thought is not None:
        fresh.update(dict.fromkeys(NAMES, thought))
    return fresh


def _content(index: int, value: Any, wanted: ContentFormat) -> Any:
    if value is None:
        return ""
    if isinstance(value, str):
        return value if wanted == "string" else [{"type": "text", "text": value}]
    if not isinstance(value, Sequence):
        raise RequestError(
            f"messages[{index}].content: a string or a list of parts is expected", "messages"
        )
    parts = [_part(index, place, part) for place, part in enumerate(value)]
    if wanted == "openai":
        return parts
    return "\n".join(part.mark if isinstance(part, MediaPart) else part["text"] for part in parts)


def _part(index: int, place: int, part: Any) -> dict[str, str]:
    where = f"messages[{index}].content[{place}]"
    if isinstance(part, MediaPart):
        return part
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise RequestError(f"{where}: an object with a type is expected", "messages")
    kind = part.get("type")
    field = {"refusal": "refusal", "thinking": "thinking"}.get(str(kind), "text")
    if kind not in ("text", "input_text", "output_text", "refusal", "thinking"):
        raise RequestError(f"{where}: this model takes no {str(kind)[:64]!r} parts", "messages")
    text = part.get(field)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{field}: a string is expected", "messages")
    return {"type": "text", "text": text}


def _call(index: int, call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, which is what templates print as JSON."""
    where = f"messages[{index}].tool_calls"
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: each call needs function.name", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}: function.arguments is not JSON", "messages") from error
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _mark_last(conversation: list[dict[str, Any]]) -> None:
    last = conversation[-1]
    if isinstance(last["content"], str):
        last["content"] += _MARK
        return
    if not last["content"] or isinstance(last["content"][-1], MediaPart):
        raise RequestError("the final message has no text to go on with", "continue_final_message")
    last["content"][-1]["text"] += _MARK


def _cut_at_mark(text: str) -> str:
    place = text.rfind(_MARK.rstrip())
    if place < 0:
        raise RequestError(
            "the chat template does not print the final message as it is, so that it cannot be "
            "continued",
            "continue_final_message",
        )
    kept = text[:place]
    return kept if text.startswith(_MARK, place) else kept.rstrip()
