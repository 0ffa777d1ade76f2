"""Tokenizer routes: /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypedDict

from fastapi import APIRouter, Request
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.responses import Response

from modulm_server.constraints import check_tools
from modulm_server.flags import ServerConfig
from modulm_server.json_body import bad_field, json_response, read, request_docs
from modulm_server.openapi import response_docs
from modulm_server.prompts import ChatOptions
from modulm_server.route import RouteFamily
from modulm_server.sampling import LIMITS
from modulm_tokenizers.detokenizer import piece_bytes

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["Tokens"]

#: A byte token of vocabularies with byte fallback.
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class TokenizeRequest(Struct, kw_only=True):
    """`POST /tokenize`: a prompt, or messages. llama.cpp's clients send `content` and the three
    fields after it.
    """

    model: str | UnsetType = UNSET
    prompt: str | None = None
    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    messages: Annotated[list[dict[str, Any]], Meta(max_length=LIMITS.messages)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[Id]
    model: str | UnsetType = UNSET


class Tokenized(TypedDict):
    """The token ids of a prompt, and their texts if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Piece(TypedDict):
    """A token and its text, or its bytes if they are not text."""

    id: int
    piece: str | list[int]


class Pieces(TypedDict):
    """The token ids of a text, in llama.cpp's form."""

    tokens: list[int] | list[Piece]


class Detokenized(TypedDict):
    """The text of token ids, in vLLM's field and in llama.cpp's."""

    prompt: str
    content: str


class TokenizerInfo(TypedDict):
    """Facts about the tokenizer."""

    tokenizer_class: str
    vocab_size: int
    special_tokens: dict[str, Any]
    stop_token_ids: list[int]
    chat_template: str | Mapping[str, str] | None


class Tokens(RouteFamily):
    """The tokenizer over HTTP."""

    name = "tokens"
    api = 2
    flagged_paths: ClassVar[Mapping[str, str]] = {
        "/tokenizer_info": "--enable-tokenizer-info-endpoint"
    }

    def absent(self) -> str | None:
        return None if self.context.engine.tokenizer is not None else "the server has no tokenizer"

    def router(self) -> APIRouter:
        router = APIRouter(tags=["Tokens"])
        router.add_api_route(
            "/tokenize",
            self.tokenize,
            methods=["POST"],
            openapi_extra=request_docs(TokenizeRequest),
            responses=response_docs(Tokenized | Pieces),
        )
        router.add_api_route(
            "/detokenize",
            self.detokenize,
            methods=["POST"],
            openapi_extra=request_docs(DetokenizeRequest),
            responses=response_docs(Detokenized),
        )
        if self.context.config.group(ServerConfig).enable_tokenizer_info_endpoint:
            router.add_api_route(
                "/tokenizer_info",
                self.info,
                methods=["GET"],
                responses=response_docs(TokenizerInfo),
            )
        return router

    async def tokenize(self, request: Request) -> Response:
        """Tokenize a prompt or a conversation."""
        body = await read(request, TokenizeRequest)
        generation = self.context.generation
        await generation.find_model(body.model)
        if body.content is not None:
            return await self._pieces(body)
        if (body.prompt is None) == (body.messages is None):
            raise bad_field("prompt", "send either prompt or messages")
        if body.prompt is not None:
            (prompt,) = await generation.tokenize(
                body.prompt, add_special_tokens=body.add_special_tokens is not False
            )
        else:
            prompt = await generation.from_messages(body.messages or [], self._options(body))
        ids = list(prompt.ids)

        def respond() -> Response:
            strings = [generation.tokenizer.id_to_token(index) for index in ids]
            answer: Tokenized = {
                "count": len(ids),
                "max_model_len": self.context.engine.info.max_model_len,
                "tokens": ids,
                "token_strs": strings if body.return_token_strs else None,
            }
            return json_response(answer)

        response: Response = await generation.work.run(len(ids), respond)
        return response

    async def _pieces(self, body: TokenizeRequest) -> Response:
        """Answer a request in llama.cpp's form."""
        if not body.parse_special:
            raise bad_field(
                "parse_special",
                "parse_special must be true: special tokens in the text are always parsed",
            )
        if body.prompt is not None or body.messages is not None:
            raise bad_field("content", "content cannot be combined with prompt or messages")
        generation = self.context.generation
        (prompt,) = await generation.tokenize(
            body.content or "", add_special_tokens=body.add_special
        )
        ids = list(prompt.ids)
        if not body.with_pieces:
            answer: Pieces = {"tokens": ids}
            return json_response(answer)

        def respond() -> Response:
            tokens: list[Piece] = [
                {"id": one, "piece": _piece(generation.tokenizer, one)} for one in ids
            ]
            pieces: Pieces = {"tokens": tokens}
            return json_response(pieces)

        response: Response = await generation.work.run(len(ids), respond)
        return response

    def _options(self, body: TokenizeRequest) -> ChatOptions:
        trusted = self.context.config.group(ServerConfig).trust_request_chat_template
        if body.chat_template is not None and not trusted:
            raise bad_field(
                "chat_template",
                "chat_template is not allowed in requests: start the server with "
                "--trust-request-chat-template",
            )
        return ChatOptions(
            tools=check_tools(body.tools),
            template=body.chat_template,
            variables=body.chat_template_kwargs or {},
            add_generation_prompt=body.add_generation_prompt is not False
            and not body.continue_final_message,
            continue_final_message=bool(body.continue_final_message),
            add_special_tokens=bool(body.add_special_tokens),
            media_io_kwargs=body.media_io_kwargs,
            mm_processor_kwargs=body.mm_processor_kwargs,
        )

    async def detokenize(self, request: Request) -> Response:
        """Detokenize token ids."""
        body = await read(request, DetokenizeRequest)
        generation = self.context.generation
        await generation.find_model(body.model)
        text = await generation.text_of(body.tokens, "tokens")
        answer: Detokenized = {"prompt": text, "content": text}
        return json_response(answer)

    async def info(self) -> Response:
        """Facts about the tokenizer."""
        tokenizer = self.context.generation.tokenizer
        # The first use imports transformers and reads the tokenizer again, which takes seconds.
        backend = await asyncio.to_thread(lambda: tokenizer.backend)
        answer: TokenizerInfo = {
            "tokenizer_class": type(backend).__name__,
            "vocab_size": len(tokenizer),
            "special_tokens": dict(tokenizer.special),
            "stop_token_ids": list(tokenizer.stop_ids),
            "chat_template": tokenizer.chat_template,
        }
        return json_response(answer)


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """The text of a token, or its bytes if it is a part of a character."""
    text: str = tokenizer.decode([token], False)
    if "\ufffd" not in text:
        return text
    spelt = tokenizer.id_to_token(token) or ""
    if single := _BYTE.fullmatch(spelt):
        return [int(single[1], 16)]
    return list(piece_bytes(spelt)) if tokenizer.spelling == "byte_level" else text
