"""Renders messages into a prompt with the checkpoint's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from modulm.errors import ConfigError, PluginNotFound, RequestError
from modulm.plugins import manager
from modulm_chat.media_part import MediaPart
from modulm_chat.named_templates import named_template, template_name
from modulm_chat.sandbox import checkpoint_renderer
from modulm_chat.templates import (
    MAX_TEMPLATE,
    ContentFormat,
    TemplateFailed,
    check_template,
    content_format,
    execute,
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

#: Names that a request must not set: those that render sets itself, and those that transformers
#: takes as arguments of the tokenizer.
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
#: The developer role. For templates that do not name it, its messages become system messages.
_DEVELOPER = "developer"
#: Splits the text of special tokens in untrusted messages. Private-use characters.
_SEAM = "\ue002\ue003"
#: Roles whose text comes from outside the application that made the request.
_UNTRUSTED_ROLES = frozenset({"user", "tool", "function", "query", "document"})
#: Marks the end of the message to continue. If its space is gone after rendering, the template
#: trims messages.
_END_MARK = "\ue000the-text-goes-on-here\ue001 "


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
    run: Callable[[str, Mapping[str, Any]], str] | None = None,
    form: Callable[[str], ContentFormat] | None = None,
) -> str:
    """Render `messages` into the text of a prompt.

    template: source to use instead of the tokenizer's own. content: the form of message contents
    that the template takes, a string or OpenAI's list of parts. kwargs: more template variables
    (`chat_template_kwargs`). run: executes the template; form: detects the content form. The
    defaults run the checkpoint's template in a separate process (`checkpoint_renderer`), and
    `template` in this one. Raises RequestError with the field that is wrong.
    """
    extra = dict(kwargs or {})
    _check_options(extra, add_generation_prompt, continue_final_message)
    if tokenizer.chat is not None:
        return _encode_by_tokenizer(
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
    run = run or (execute if template else checkpoint_renderer().render)
    form = form or (content_format if template else checkpoint_renderer().content_format)
    content_kind = form(source) if content == "auto" else content
    conversation = normalise(messages, content_kind)
    place_thoughts(conversation, source)
    if _DEVELOPER not in source:
        conversation = _without_developers(conversation)
    if continue_final_message:
        _mark_final_message(conversation)
    variables = {
        **tokenizer.special,
        **extra,
        "messages": conversation,
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "documents": None if documents is None else [dict(entry) for entry in documents],
        "add_generation_prompt": add_generation_prompt,
    }
    text = run(source, variables)
    return _cut_at_end_mark(text) if continue_final_message else text


def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    tokenizer: Tokenizer,
    add_special_tokens: bool = False,
    encode: Callable[..., list[int]] | None = None,
    **options: Any,
) -> tuple[list[int], str]:
    """Render and tokenize `messages`; returns (token ids, text). options: those of `render`.

    Text of users and tools cannot become control tokens: it is tokenized as text. encode: used
    instead of the tokenizer's, for each piece in order. add_special_tokens: for templates that do
    not write the prompt's first tokens themselves. A tokenizer that encodes conversations itself
    does all of this.
    """
    if tokenizer.chat is not None:
        return _encode_by_tokenizer(messages, tokenizer, has_embeds=encode is not None, **options)
    sealed = _seal(messages, tokenizer.special_tokens)
    first, *others = _pieces(render(sealed, tokenizer=tokenizer, **options))
    encode = encode or tokenizer.encode
    ids = list(encode(first, add_special_tokens=add_special_tokens))
    for piece in others:
        ids += encode(piece, add_special_tokens=False)
    return ids, "".join([first, *others])


def _encode_by_tokenizer(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    has_embeds: bool = False,
    run: Callable[[str, Mapping[str, Any]], str] | None = None,
    content: str = "auto",
    form: object = None,
) -> tuple[list[int], str]:
    """Encode a conversation with a tokenizer that needs no template; run and form are unused.

    Raises RequestError for features that its format lacks.
    """
    extra = dict(kwargs or {})
    _check_options(extra, add_generation_prompt, continue_final_message)
    for value, name in ((template, "chat_template"), (documents, "documents")):
        if value:
            raise RequestError(
                f"{name}: this model's tokenizer encodes messages itself, without a template", name
            )
    if has_embeds:
        raise RequestError("messages: this model's messages cannot contain embeddings", "messages")
    if tokenizer.chat is None:
        raise RequestError("this tokenizer cannot encode messages", "messages")
    return tokenizer.chat.encode(
        normalise(messages, "string", ordered=True),
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
            "continue_final_message and add_generation_prompt exclude each other: the first "
            "continues the last message, the second starts a new one",
            "continue_final_message",
        )
    for key in extra:
        if key in _RESERVED or not key.isidentifier():
            raise RequestError(
                f"chat_template_kwargs: {key[:64]!r} is not a variable that a request may set",
                "chat_template_kwargs",
            )


def choose_template(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return the tokenizer's template: of several, `tool_use` with tools, else `default`."""
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = (template.get("tool_use") if tools else None) or template.get("default")
    if not template:
        raise RequestError(
            "this model's tokenizer has no chat template; start the server with --chat-template "
            "or send a prompt to /v1/completions",
            "messages",
        )
    return template


def load_template(value: str) -> str:
    """Load the template of `--chat-template`: a file, an installed name, or the source itself.

    Raises ConfigError if it is none of these or does not compile.
    """
    source = value
    if not any(mark in value for mark in ("{{", "{%", "\n")):
        source = (
            _installed_template(value) if not Path(value).exists() else _file_template(Path(value))
        )
    try:
        check_template(source)
    except TemplateFailed as error:
        raise ConfigError("chat_template", f"{value[:200]}: {error.message}") from error
    return source


def _file_template(file: Path) -> str:
    try:
        if file.stat().st_size > 4 * MAX_TEMPLATE:
            raise ConfigError("chat_template", f"{file} is too large for a template")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("chat_template", f"{file} cannot be read: {error}") from error


def _installed_template(value: str) -> str:
    plugins = manager.current()
    name = template_name(value)
    try:
        return named_template(plugins, name).source
    except PluginNotFound as error:
        known = sorted({declared.name for declared in plugins.names("chat_templates")})
        close = get_close_matches(name, known, n=3)
        suggestion = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(
            "chat_template",
            f"{value!r} is neither a readable file, nor a Jinja template, nor an installed "
            f"template{suggestion} (`modulm plugins list chat_templates` lists them)",
        ) from error


def normalise(
    messages: Sequence[Mapping[str, Any]], content_kind: ContentFormat, ordered: bool = False
) -> list[dict[str, Any]]:
    """Normalise messages for templates: one form of contents, call arguments as objects.

    ordered: leave media that lead where they are. Returns new values. Raises
    RequestError(param="messages").
    """
    if not messages:
        raise RequestError("messages: at least one message is required", "messages")
    return [
        _message(index, message, content_kind, ordered) for index, message in enumerate(messages)
    ]


def _without_developers(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn developer messages into system messages. One after a system message is merged into it,
    because many templates accept only one system message, at the start.
    """
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
    """Keep the text of users and tools from becoming control tokens.

    Inserts a seam into every special token in their text. `_pieces` cuts the rendered prompt at
    the seams, so that no piece contains one. special: the texts of special tokens.
    """
    pattern = _special_pattern(tuple(special))
    return [
        {**message, "content": _sealed(message.get("content"), pattern)}
        if isinstance(message, Mapping) and _is_untrusted(message.get("role"))
        else message
        for message in messages
    ]


def _is_untrusted(role: Any) -> bool:
    return isinstance(role, str) and role in _UNTRUSTED_ROLES


def _pieces(text: str) -> list[str]:
    """Cut a prompt of sealed messages at its seams; joined, the pieces are the prompt."""
    return text.split(_SEAM)


@lru_cache(maxsize=8)
def _special_pattern(special: tuple[str, ...]) -> re.Pattern[str]:
    alternatives = [re.escape(token) for token in special if len(token) > 1]
    return re.compile("|".join(alternatives) if alternatives else r"(?!)")


def _sealed(content: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(content, str):
        return pattern.sub(lambda match: match[0][0] + _SEAM + match[0][1:], content)
    if isinstance(content, MediaPart):
        return content
    if isinstance(content, Mapping):
        return {key: _sealed(value, pattern) for key, value in content.items()}
    if isinstance(content, Sequence):
        return [_sealed(part, pattern) for part in content]
    return content


def _message(
    index: int, message: Mapping[str, Any], content_kind: ContentFormat, ordered: bool
) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] must be an object with a role", "messages")
    fresh = {key: value for key, value in message.items() if value is not None}
    content, thought = take_thought(index, message)
    fresh["content"] = _content(index, content, content_kind, ordered)
    if fresh.get("tool_calls"):
        if not isinstance(fresh["tool_calls"], (list, tuple)):
            raise RequestError(f"messages[{index}].tool_calls must be a list", "messages")
        fresh["tool_calls"] = [_call(index, call) for call in fresh["tool_calls"]]
    else:
        fresh.pop("tool_calls", None)
    if thought is not None:
        fresh.update(dict.fromkeys(NAMES, thought))
    return fresh


def _content(index: int, value: Any, content_kind: ContentFormat, ordered: bool) -> Any:
    if value is None:
        return ""
    if isinstance(value, str):
        return value if content_kind == "string" else [{"type": "text", "text": value}]
    if not isinstance(value, Sequence):
        raise RequestError(
            f"messages[{index}].content must be a string or a list of parts", "messages"
        )
    parts = [_part(index, at, part) for at, part in enumerate(value)]
    if content_kind == "openai":
        return parts
    if not ordered:
        parts.sort(key=lambda part: not (isinstance(part, MediaPart) and part.leads))
    return "\n".join(part.mark if isinstance(part, MediaPart) else part["text"] for part in parts)


def _part(index: int, at: int, part: Any) -> dict[str, str]:
    where = f"messages[{index}].content[{at}]"
    if isinstance(part, MediaPart):
        return part
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} must be an object with a type", "messages")
    kind = part.get("type")
    field = {"refusal": "refusal", "thinking": "thinking"}.get(str(kind), "text")
    if kind not in ("text", "input_text", "output_text", "refusal", "thinking"):
        raise RequestError(
            f"{where}: this model does not support {str(kind)[:64]!r} parts", "messages"
        )
    text = part.get(field)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{field} must be a string", "messages")
    return {"type": "text", "text": text}


def _call(index: int, call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, which templates print as JSON."""
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


def _mark_final_message(conversation: list[dict[str, Any]]) -> None:
    last = conversation[-1]
    if isinstance(last["content"], str):
        last["content"] += _END_MARK
        return
    if not last["content"] or isinstance(last["content"][-1], MediaPart):
        raise RequestError("the final message has no text to continue", "continue_final_message")
    last["content"][-1]["text"] += _END_MARK


def _cut_at_end_mark(text: str) -> str:
    position = text.rfind(_END_MARK.rstrip())
    if position < 0:
        raise RequestError(
            "the chat template changes the final message, so that it cannot be continued",
            "continue_final_message",
        )
    prompt = text[:position]
    return prompt if text.startswith(_END_MARK, position) else prompt.rstrip()
