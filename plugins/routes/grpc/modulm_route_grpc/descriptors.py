"""Messages and services of vLLM's protos, and how an object becomes a service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from importlib.resources import files
from logging import getLogger
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.struct_pb2 import DESCRIPTOR as _STRUCT

from modulm_route_grpc.http_calls import Call, CallFailed, client_headers

__all__ = ["handler_of", "message"]

log = getLogger("modulm_server")
_pool = descriptor_pool.Default()


def _load() -> None:
    """Add the protos of this package to protobuf's pool. They use its Struct."""
    _pool.FindFileByName(_STRUCT.name)
    data = files(__package__).joinpath("services.binpb").read_bytes()
    for file in FileDescriptorSet.FromString(data).file:
        _pool.AddSerializedFile(file.SerializeToString())


_load()


def message(name: str) -> Any:
    """Return the class of a message of the package vllm."""
    return GetMessageClass(_pool.FindMessageTypeByName(f"vllm.{name}"))


def handler_of(service: str, implementation: object) -> grpc.GenericRpcHandler:
    """Make a service of an object with a method for each call. Calls without one are
    UNIMPLEMENTED.
    """
    handlers = {}
    for method in _pool.FindServiceByName(service).methods:
        answer = getattr(implementation, method.name, None)
        if answer is None:
            continue
        decode, guarded = GetMessageClass(method.input_type).FromString, _guarded
        make = grpc.unary_unary_rpc_method_handler
        if method.server_streaming:
            make, guarded = grpc.unary_stream_rpc_method_handler, _guarded_stream
        handlers[method.name] = make(guarded(answer, decode))  # messages are bytes, as they come
    return grpc.method_handlers_generic_handler(service, handlers)


def _guarded(answer: Callable[..., Awaitable[Any]], decode: Callable[[bytes], Any]) -> Any:
    """Make a method of bytes, and turn the errors of a call into its status."""

    @wraps(answer)
    async def answered(data: bytes, context: Any) -> bytes:
        try:
            call = Call(client_headers(context), len(data))
            return await call.encode(await answer(await call.convert(_read, decode, data), call))
        except Exception as error:
            await context.abort(*_status(answer.__name__, error))
            raise

    return answered


def _guarded_stream(answer: Callable[..., Any], decode: Callable[[bytes], Any]) -> Any:
    """The same for a call with several answers."""

    @wraps(answer)
    async def answered(data: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            call = Call(client_headers(context), len(data))
            async for response in answer(await call.convert(_read, decode, data), call):
                yield await call.encode(response)
        except Exception as error:
            await context.abort(*_status(answer.__name__, error))

    return answered


def _read(decode: Callable[[bytes], Any], data: bytes) -> Any:
    """The message in bytes. Raises CallFailed."""
    try:
        return decode(data)
    except DecodeError as error:
        code = grpc.StatusCode.INVALID_ARGUMENT
        raise CallFailed(code, "the message is not the one that this call takes") from error


def _status(name: str, error: Exception) -> tuple[grpc.StatusCode, str, Any]:
    """How a call ends that failed."""
    if isinstance(error, CallFailed):
        return error.code, error.message, error.details
    log.error("gRPC call %s failed", name, exc_info=error)
    return grpc.StatusCode.INTERNAL, "internal error", ()
