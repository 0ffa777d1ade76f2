"""Text to token ids and back: /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from fastapi import APIRouter, Request
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.responses import Response

from modulm.text.detokenizer import piece_bytes
from modulm_server.constraints import check_tools
from modulm_server.flags import ServerConfig
from modulm_server.json_body import bad_field, json_response, read, request_docs
from modulm_server.openapi import response_docs
from modulm_server.prompts import ChatOptions
from modulm_server.route import RouteFamily
from modulm_server.sampling import LIMITS

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["Tokens"]

#: How vocabularies that fall back to bytes write one.
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
#: Ids that are detokenized at once, where the model's context is not longer.
_MOST_TOKENS = 1 << 18
Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class TokenizeRequest(Struct, kw_only=True):
    """`POST /tokenize`: a prompt, or messages.

    In llama.cpp's words it is `content`, with the three fields after that.
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
    """The ids of a prompt, and their texts where these were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Piece(TypedDict):
    """A token and its text; its bytes where these are none."""

    id: int
    piece: str | list[int]


class Pieces(TypedDict):
    """The ids of a text, as llama.cpp's clients read them."""

    tokens: list[int] | list[Piece]


class Detokenized(TypedDict):
    """The text of token ids, by vLLM's name and by llama.cpp's."""

    prompt: str
    content: str


class TokenizerInfo(TypedDict):
    """What the tokenizer is."""

    tokenizer_class: str
    vocab_size: int
    special_tokens: dict[str, Any]
    stop_token_ids: list[int]
    chat_template: str | Mapping[str, str] | None


class Tokens(RouteFamily):
    """What the tokenizer does, over HTTP."""

    name = "tokens"
    api = 2

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
        """The ids that a prompt or a conversation becomes."""
        body = await read(request, TokenizeRequest)
        generation = self.context.generation
        await generation.find_model(body.model)
        if body.content is not None:
            return await self._pieces(body)
        if (body.prompt is None) == (body.messages is None):
            raise bad_field("prompt", "either prompt or messages is needed")
        if body.prompt is not None:
            (prompt,) = await generation.tokenize(
                body.prompt, add_special_tokens=body.add_special_tokens is not False
            )
        else:
            prompt = await generation.from_messages(body.messages or [], self._options(body))
        ids = list(prompt.ids)

        def strings() -> list[str | None]:
            return [generation.tokenizer.id_to_token(index) for index in ids]

        told: Tokenized = {
            "count": len(ids),
            "max_model_len": self.context.engine.info.max_model_len,
            "tokens": ids,
            "token_strs": await generation.work.run(len(ids), strings)
            if body.return_token_strs
            else None,
        }
        return json_response(told)

    async def _pieces(self, body: TokenizeRequest) -> Response:
        """The answer to a request in llama.cpp's words."""
        if not body.parse_special:
            raise bad_field("parse_special", "parse_special: tokens that are written out are read")
        if body.prompt is not None or body.messages is not None:
            raise bad_field("content", "content: not together with prompt or messages")
        generation = self.context.generation
        (prompt,) = await generation.tokenize(
            body.content or "", add_special_tokens=body.add_special
        )
        ids = list(prompt.ids)
        if not body.with_pieces:
            told: Pieces = {"tokens": ids}
            return json_response(told)

        def pieces() -> Pieces:
            found: list[Piece] = [
                {"id": one, "piece": _piece(generation.tokenizer, one)} for one in ids
            ]
            return {"tokens": found}

        return json_response(await generation.work.run(len(ids), pieces))

    def _options(self, body: TokenizeRequest) -> ChatOptions:
        trusted = self.context.config.group(ServerConfig).trust_request_chat_template
        if body.chat_template is not None and not trusted:
            raise bad_field(
                "chat_template",
                "chat_template: this server renders only its own; it would need "
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
        """The text of token ids."""
        body = await read(request, DetokenizeRequest)
        generation = self.context.generation
        await generation.find_model(body.model)
        size = max(len(generation.tokenizer), self.context.engine.info.vocabulary)
        most = max(_MOST_TOKENS, self.context.engine.info.max_model_len)
        if len(body.tokens) > most:
            raise bad_field("tokens", f"tokens: at most {most}")
        wrong = max(body.tokens, default=0)
        if wrong >= size:
            raise bad_field("tokens", f"tokens: {wrong} is out of vocabulary (0 to {size - 1})")
        decode = generation.tokenizer.decode
        text = await generation.work.run(len(body.tokens), decode, body.tokens, False)
        told: Detokenized = {"prompt": text, "content": text}
        return json_response(told)

    async def info(self) -> Response:
        """What the tokenizer is."""
        tokenizer = self.context.generation.tokenizer
        told: TokenizerInfo = {
            "tokenizer_class": type(tokenizer.backend).__name__,
            "vocab_size": len(tokenizer),
            "special_tokens": dict(tokenizer.special),
            "stop_token_ids": list(tokenizer.stop_ids),
            "chat_template": tokenizer.chat_template,
        }
        return json_response(told)


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """The text of a token, or its bytes where it is a part of a character."""
    text: str = tokenizer.decode([token], False)
    if "\ufffd" not in text:
        return text
    spelt = tokenizer.id_to_token(token) or ""
    if single := _BYTE.fullmatch(spelt):
        return [int(single[1], 16)]
    return list(piece_bytes(spelt)) if tokenizer.spelling == "byte_level" else text
