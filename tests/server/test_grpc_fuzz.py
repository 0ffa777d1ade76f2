"""gRPC messages with any values in any fields, and damaged ones: refused or answered, never our
fault.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from tests.server.test_grpc import port_of, status_of
from tests.server.test_input_fuzz import damaged

from modulm_route_grpc import descriptors
from modulm_route_grpc.descriptors import message
from modulm_server.testing import Live

SERVICES = ("vllm.Inference", "vllm.Control", "vllm.grpc.engine.VllmEngine")
#: They hold up the others.
PAUSES = ("PauseGeneration", "Sleep")
FAULTS = {
    grpc.StatusCode[name]
    for name in ("INTERNAL", "UNKNOWN", "DATA_LOSS", "DEADLINE_EXCEEDED", "UNAVAILABLE")
}
TEXTS = (
    "", "a", "hi " * 50, "\0", "e\u0301\u202e", "{}", '{"type": "object"}', "[" * 20_000,
    '{"a":' * 2000, "9" * 5000, "-1", "²", "../x", "a" * 300, "data:image/png;base64,aGk=",
    "https://127.0.0.1/x", "M",
)  # fmt: skip
NUMBERS = (0, 1, 2, 3, 5, 100, -1, 1 << 31, -(1 << 31), (1 << 63) - 1)
SIGNED = {FieldDescriptor.CPPTYPE_INT32: 32, FieldDescriptor.CPPTYPE_INT64: 64}
UNSIGNED = {FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_UINT64: 64}


def scalar(field: Any, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind in UNSIGNED:
        return rng.choice(NUMBERS) % (1 << UNSIGNED[kind])
    if kind in SIGNED:
        half = 1 << SIGNED[kind] - 1
        return (rng.choice(NUMBERS) + half) % (2 * half) - half
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice((0.0, 1.0, 0.5, -1.0, math.nan, math.inf, 1e38))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice([*(one.number for one in field.enum_type.values), 77])
    text = rng.choice(TEXTS)
    return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text


def fill(filled: Any, rng: random.Random, share: float, depth: int = 0) -> None:
    """Set a share of the fields of a message, and of those in it."""
    for field in filled.DESCRIPTOR.fields:
        if rng.random() > share or depth > 5:
            continue
        target = getattr(filled, field.name)
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            key, value = (inner.fields_by_name[name] for name in ("key", "value"))
            for _ in range(rng.randrange(3)):
                if value.message_type is None:
                    target[scalar(key, rng)] = scalar(value, rng)
                else:
                    fill(target[scalar(key, rng)], rng, share, depth + 1)
        elif field.is_repeated:
            for _ in range(rng.choice((1, 1, 2, 40))):
                if inner is None:
                    target.append(scalar(field, rng))
                else:
                    fill(target.add(), rng, share, depth + 1)
        elif inner is not None:
            target.SetInParent()
            fill(target, rng, share, depth + 1)
        else:
            setattr(filled, field.name, scalar(field, rng))


@pytest.fixture(scope="module")
def server(make_server: Callable[..., Live]) -> Live:
    return make_server(
        {"tasks": ("generate", "embed"), "parts": {"adapters": {"slots": 2}}}, grpc_port=0,
        server_dev_mode=True, enable_lora=True, allow_runtime_lora_updating=True,
    )  # fmt: skip


def test_values_that_no_json_has_are_named(server: Live) -> None:
    """Each was an internal error."""
    version = message("UpdateWeightVersionRequest")(weight_version="9" * 5000)
    update = message("UpdateWeightsRequest")(update_info_json=b'{"a":' + b"[" * 100_000)
    generate = message("GenerateRequest")(text="a")
    generate.kv.kv_transfer_params["a"] = math.nan
    with grpc.insecure_channel(f"127.0.0.1:{port_of(server)}") as channel:
        for path, request, name in (
            ("/vllm.Control/UpdateWeightVersion", version, "weight_version"),
            ("/vllm.Control/UpdateWeights", update, "update_info_json"),
            ("/vllm.Inference/Generate", generate, "kv.kv_transfer_params"),
        ):
            call = channel.unary_unary(path)
            code, text = status_of(lambda: call(request.SerializeToString(), timeout=300))  # noqa: B023
            assert code is grpc.StatusCode.INVALID_ARGUMENT, text
            assert text.startswith(f"{name}: ")


def test_any_message_is_answered_or_refused(server: Live, rng: random.Random, rounds: int) -> None:
    codes: Counter[str] = Counter()
    faults: list[str] = []
    with grpc.insecure_channel(f"127.0.0.1:{port_of(server)}") as channel:
        for service in SERVICES:
            for method in descriptors._pool.FindServiceByName(service).methods:
                path, kind = f"/{service}/{method.name}", GetMessageClass(method.input_type)
                make = channel.unary_stream if method.server_streaming else channel.unary_unary
                for number in range(0 if method.name in PAUSES else 2 * rounds):
                    request = kind()
                    fill(request, rng, rng.choice((0.1, 0.3, 0.8)))
                    data = request.SerializeToString()
                    call = make(path)
                    try:
                        answer = call(damaged(data, rng) if number % 2 else data, timeout=300)
                        list(answer if method.server_streaming else [answer])
                        codes["OK"] += 1
                    except grpc.RpcError as error:
                        code = error.code()  # type: ignore[attr-defined]
                        codes[code.name] += 1
                        if code in FAULTS:
                            faults.append(f"{path}: {error}\n{str(request)[:500]}")
    assert not faults, "\n".join(faults[:20])
    assert {"OK", "INVALID_ARGUMENT"} <= codes.keys(), codes
    assert not server.engine.active
    with server.client() as http:
        assert http.get("/load").json() == {"server_load": 0}
