"""Convert conversations in OpenAI's format to mistral-common's, and its errors to ours."""

from __future__ import annotations

import hashlib
import json
import re
import string
from typing import TYPE_CHECKING, Any

from mistral_common.exceptions import (
    InvalidToolException,
    InvalidToolSchemaException,
    MistralCommonException,
)
from mistral_common.protocol.instruct.request import ChatCompletionRequest

from modulm.contracts.tokenizer import ChatEncoder
from modulm.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    from modulm.contracts.tokenizer import Codec

__all__ = ["MistralChatEncoder"]

_EFFORT = "reasoning_effort"
#: Format of tool call ids in all of Mistral's prompts.
_IDENTITY = re.compile(r"[A-Za-z0-9]{9}")
_LETTERS = string.ascii_letters + string.digits
#: Where an image belongs in a message, with the line feeds that join it to text.
_IMAGE = re.compile("\n?\ue004\\[IMG\\]\ue005\n?")


class MistralChatEncoder(ChatEncoder):
    """Encodes messages with tools, calls, results and reasoning through mistral-common."""

    def __init__(self, mistral: MistralTokenizer[Any, Any, Any, Any, Any], codec: Codec) -> None:
        self._mistral = mistral
        self._codec = codec
        self._thinks = codec.index("[THINK]") in codec.special_ids()

    def encode(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, object],
    ) -> tuple[list[int], str]:
        """Encode the messages. Mistral has no generation prompt: a user turn ends where an answer
        begins.
        """
        settings = _settings(variables)
        try:
            request = ChatCompletionRequest.from_openai(
                messages=[self._message(message) for message in messages],
                tools=[_tool(tool) for tool in tools] or None,
                continue_final_message=continue_final_message,
                **settings,
            )
            ids = list(self._mistral.encode_chat_completion(request).tokens)
        except (InvalidToolException, InvalidToolSchemaException) as error:
            raise RequestError(f"tools: {error.message}", "tools") from error
        except MistralCommonException as error:
            raise RequestError(f"messages: {error.message}", "messages") from error
        except (ValueError, TypeError, AssertionError, KeyError, NotImplementedError) as error:
            raise RequestError(f"messages: {_first(error)}", "messages") from error
        if continue_final_message and ids[-1:] == [self._codec.index("</s>")]:
            # versions before 1.10 append an end token to a continued answer with tokenizer v7
            ids.pop()
        return ids, self._codec.decode(ids, False)

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Keep only the fields that mistral-common accepts; it rejects others."""
        role, content = message["role"], message.get("content") or ""
        if role in ("system", "developer"):
            return {"role": "system", "content": content}
        if role == "tool":
            fields = {"name": message["name"]} if message.get("name") else {}
            identity = _identity(message.get("tool_call_id"))
            return {"role": role, "content": content, "tool_call_id": identity, **fields}
        if role != "assistant":
            return {"role": role, "content": _with_images(content)}
        thought = message.get("reasoning_content") if self._thinks else None
        calls = [_call(call) for call in message.get("tool_calls") or ()]
        text: Any = content or None
        if thought:
            text = [{"type": "thinking", "thinking": thought, "closed": True}]
            text += [{"type": "text", "text": content}] if content else []
        return {"role": role, "content": text, **({"tool_calls": calls} if calls else {})}


def _with_images(content: Any) -> Any:
    """Return a message's content as parts, if it has places of images."""
    first, *others = _IMAGE.split(content) if isinstance(content, str) else [content]
    if not others:
        return content
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}] if first else []
    for text in others:
        # The image itself is read by the model's media family.
        parts.append({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}})
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def _settings(variables: Mapping[str, object]) -> dict[str, Any]:
    """Return mistral-common's settings. Of all template variables only a reasoning effort is used,
    by newer versions.
    """
    for name in variables:
        if name != _EFFORT or _EFFORT not in ChatCompletionRequest.model_fields:
            field = _EFFORT if name == _EFFORT else "chat_template_kwargs"
            raise RequestError(
                f"{field}: {name[:64]!r} is not supported by this model's tokenizer, which encodes "
                "messages without a template",
                field,
            )
    return dict(variables)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function") or {}
    known = {
        "name": function.get("name"),
        "description": function.get("description") or "",
        "parameters": function.get("parameters") or {},
    }
    return {"type": "function", "function": known}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {
        "id": _identity(call.get("id")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _identity(call_id: object) -> str:
    """Return a call id of nine letters and digits: the given one if valid, else a hash of it."""
    if isinstance(call_id, str) and _IDENTITY.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.blake2b(str(call_id).encode(), digest_size=16).digest())
    return "".join(_LETTERS[number // len(_LETTERS) ** n % len(_LETTERS)] for n in range(9))


def _first(error: BaseException) -> str:
    """Summarise an error in one sentence; of a pydantic error, the first entry."""
    errors = getattr(error, "errors", None)
    listed = errors() if callable(errors) else []
    if listed:
        location = ".".join(map(str, listed[0]["loc"]))
        return f"{location}: {listed[0]['msg']}"[:500]
    return str(error)[:500] or type(error).__name__
