"""Messages and services of vLLM's protos, and how an object becomes a service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from importlib.resources import files
from logging import getLogger
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.struct_pb2 import DESCRIPTOR as _STRUCT

from modulm_route_grpc.http_calls import CallFailed

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
        make = grpc.unary_unary_rpc_method_handler
        guarded: Any = _guarded(answer)
        if method.server_streaming:
            make, guarded = grpc.unary_stream_rpc_method_handler, _guarded_stream(answer)
        handlers[method.name] = make(
            guarded,
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service, handlers)


def _guarded(answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """Turn the errors of a call into its status."""

    @wraps(answer)
    async def call(request: Any, context: Any) -> Any:
        try:
            return await answer(request, context)
        except CallFailed as error:
            await context.abort(error.code, error.message, error.details)
        except grpc.aio.AbortError:
            raise
        except Exception:
            log.exception("gRPC call %s failed", answer.__name__)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")

    return call


def _guarded_stream(answer: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The same for a call with several answers."""

    @wraps(answer)
    async def call(request: Any, context: Any) -> Any:
        try:
            async for response in answer(request, context):
                yield response
        except CallFailed as error:
            await context.abort(error.code, error.message, error.details)
        except grpc.aio.AbortError:
            raise
        except Exception:
            log.exception("gRPC call %s failed", answer.__name__)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")

    return call
