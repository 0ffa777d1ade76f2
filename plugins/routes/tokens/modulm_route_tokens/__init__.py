"""Text to token ids and back: /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypedDict

from fastapi import APIRouter, Request
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.responses import Response

from modulm_server.constraints import check_tools
from modulm_server.flags import ServerConfig
from modulm_server.json_body import bad_field, json_response, read, takes
from modulm_server.openapi import gives
from modulm_server.prompts import ChatOptions
from modulm_server.route import RouteFamily
from modulm_server.sampling import LIMITS

__all__ = ["Tokens"]

#: Ids that are detokenized at once, where the model's context is not longer.
_MOST_TOKENS = 1 << 18
Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class TokenizeRequest(Struct, kw_only=True):
    """`POST /tokenize`: a prompt, or messages."""

    model: str | UnsetType = UNSET
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(max_length=LIMITS.messages)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
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


class Detokenized(TypedDict):
    """The text of token ids."""

    prompt: str


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
            openapi_extra=takes(TokenizeRequest),
            responses=gives(Tokenized),
        )
        router.add_api_route(
            "/detokenize",
            self.detokenize,
            methods=["POST"],
            openapi_extra=takes(DetokenizeRequest),
            responses=gives(Detokenized),
        )
        if self.context.config.group(ServerConfig).enable_tokenizer_info_endpoint:
            router.add_api_route(
                "/tokenizer_info", self.info, methods=["GET"], responses=gives(TokenizerInfo)
            )
        return router

    async def tokenize(self, request: Request) -> Response:
        """The ids that a prompt or a conversation becomes."""
        body = await read(request, TokenizeRequest)
        generation = self.context.generation
        await generation.find_model(body.model)
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

    def _options(self, body: TokenizeRequest) -> ChatOptions:
        trusted = self.context.config.group(ServerConfig).trust_request_chat_template
        if body.chat_template is not None and not trusted:
            raise bad_field(
                "chat_template",
                "chat_template: this server renders only its own; it would need "
                "--trust-request-chat-template",
            )
        if body.mm_processor_kwargs:
            raise bad_field("mm_processor_kwargs", "mm_processor_kwargs: not yet supported")
        return ChatOptions(
            tools=check_tools(body.tools),
            template=body.chat_template,
            variables=body.chat_template_kwargs or {},
            add_generation_prompt=body.add_generation_prompt is not False
            and not body.continue_final_message,
            continue_final_message=bool(body.continue_final_message),
            add_special_tokens=bool(body.add_special_tokens),
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
        told: Detokenized = {"prompt": text}
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
