"""gRPC: real clients of vLLM's services, SMG's published stubs, health checks and reflection."""

from __future__ import annotations

import asyncio
import io
import socket
import ssl
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import grpc_tools
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_tools import protoc
from loop_turns import BOUND, Beat
from smg_grpc_proto import vllm_engine_pb2 as smg
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from modulm.config import EngineConfig
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import ConfigError
from modulm_route_grpc.descriptors import message
from modulm_route_grpc.http_calls import HttpCalls
from modulm_route_grpc.intake import message_limit
from modulm_route_grpc.server import GrpcServer, _credentials
from modulm_server.flags import ServerConfig
from modulm_server.serve import with_http_address
from modulm_server.testing import Live

PACKAGE = Path(__file__).parents[2] / "plugins/routes/grpc"
KEY = (("authorization", "Bearer k1"),)
GENERATE = message("GenerateRequest")


class Client:
    """A client that learns services from the server's reflection, as grpcurl does."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))

    def message(self, name: str, **fields: Any) -> Any:
        return GetMessageClass(self.pool.FindMessageTypeByName(f"vllm.{name}"))(**fields)

    def call(self, path: str, request: Any, *, key: Any = KEY) -> Any:
        service, _, name = path.partition("/")
        method = self.pool.FindServiceByName(service).FindMethodByName(name)
        make = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        call = make(
            f"/{path}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        return call(request, metadata=key, timeout=300)


@pytest.fixture(scope="module")
def server(make_server: Callable[..., Live]) -> Live:
    return make_server(
        grpc_port=0, api_key=("k1", "k2"), server_dev_mode=True, served_model_name=("M", "alias"),
        max_request_bytes=1 << 20,
    )  # fmt: skip


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[Client]:
    (family,) = (one for one in server.served.families if one.name == "grpc")
    with grpc.insecure_channel(f"127.0.0.1:{family.server.port}") as channel:  # type: ignore[attr-defined]
        yield Client(channel)


@pytest.fixture(scope="module")
def router(client: Client) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(client.channel)


def status_of(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code(), raised.value.details()  # type: ignore[attr-defined]


def test_descriptors_are_those_of_the_protos(tmp_path: Path) -> None:
    compiled = tmp_path / "services.binpb"
    files = [f"modulm_route_grpc/{name}.proto" for name in ("inference", "control")]
    folders = [f"-I{PACKAGE}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
    assert protoc.main(["", *folders, f"--descriptor_set_out={compiled}", *files]) == 0
    read = descriptor_pb2.FileDescriptorSet.FromString
    stored = (PACKAGE / "modulm_route_grpc/services.binpb").read_bytes()
    assert read(stored) == read(compiled.read_bytes())


def test_generate_whole_and_streamed(client: Client, server: Live, tokenizer: Tokenizer) -> None:
    request = client.message(
        "GenerateRequest",
        request_id="mine", text="stop at END", model="alias",
        stopping={"stop_strings": ["END"], "max_new_tokens": 100},
        sampling={"top_p": 0.5, "seed": 3},
        decoding={"logit_bias": {7: 1.5}, "presence_penalty": 0.25},
        response={"prompt_token_ids": True, "output_token_ids": True, "output_logprobs": True,
                  "output_candidates": {"top_n": 2}, "prompt_logprobs": True},
        kv={"cache_salt": "salt"},
    )  # fmt: skip
    whole = client.call("vllm.Inference/Generate", request)
    params = server.engine.seen[-1][1]
    assert (params.temperature, params.top_p, params.seed) == (0, 0.5, 3)
    assert (params.logit_bias, params.presence_penalty) == ({7: 1.5}, 0.25)
    assert server.engine.salts[-1].endswith("salt")
    ids = tokenizer.encode("stop at END")
    assert list(whole.prompt_info.token_ids) == list(ids)
    assert whole.prompt_info.num_prompt_tokens == len(whole.prompt_info.logprobs) == len(ids)
    assert whole.outputs.text == "before "
    finish = whole.outputs.finish_info
    assert (finish.finish_reason, finish.stop_string) == (2, "END")
    assert finish.num_output_tokens == whole.outputs.num_tokens == len(whole.outputs.token_ids)
    assert len(whole.outputs.logprobs) == whole.outputs.num_tokens
    assert {len(one.tokens) for one in whole.outputs.candidate_tokens} == {1}
    request.response.prompt_logprobs = False
    request.sampling.num_sequences = 2
    parts = list(client.call("vllm.Inference/GenerateStream", request))
    assert [part.HasField("prompt_info") for part in parts] == [True] + [False] * (len(parts) - 1)
    for index in (0, 1):
        own = [part.outputs for part in parts if part.outputs.index == index]
        assert "".join(one.text for one in own) == "before "
        assert [one.HasField("finish_info") for one in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].finish_info.num_output_tokens == sum(one.num_tokens for one in own)
    tokens = client.message("GenerateRequest", token_ids={"ids": ids}, response={})
    tokens.response.output_text = False
    assert client.call("vllm.Inference/Generate", tokens).outputs.text == ""
    assert server.engine.seen[-1][1].max_tokens == 20


def test_keys_limits_and_errors_are_those_of_http(client: Client, server: Live) -> None:
    generate = "vllm.Inference/Generate"
    good = client.message("GenerateRequest", text="Hello")
    for key in ((), (("authorization", "Bearer no"),)):
        code, _ = status_of(lambda key=key: client.call(generate, good, key=key))  # type: ignore[misc]
        assert code is grpc.StatusCode.UNAUTHENTICATED
    code, _ = status_of(
        lambda: client.call(
            "vllm.Control/GetModelInfo", client.message("GetModelInfoRequest"), key=()
        )
    )
    assert code is grpc.StatusCode.UNAUTHENTICATED
    for fields, expected, words in (
        ({"model": "other", "text": "a"}, grpc.StatusCode.NOT_FOUND, "other"),
        ({}, grpc.StatusCode.INVALID_ARGUMENT, "prompt: is missing"),
        ({"text": "a", "session_id": "s"}, grpc.StatusCode.INVALID_ARGUMENT, "session_id"),
        ({"text": "a", "sampling": {"top_p": 2.0}}, grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
        ({"text": "a", "decoding": {"json": "{"}}, grpc.StatusCode.INVALID_ARGUMENT, "be JSON"),
        ({"text": "queue is full"}, grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full"),
        ({"text": "leak a secret"}, grpc.StatusCode.INTERNAL, "internal error"),
    ):  # fmt: skip
        request = client.message("GenerateRequest", **fields)
        code, message = status_of(lambda request=request: client.call(generate, request))  # type: ignore[misc]
        assert (code, words in message, "secret" in message) == (expected, True, False), message
    code, message = status_of(
        lambda: list(
            client.call(
                "vllm.Inference/GenerateStream",
                client.message("GenerateRequest", text="fail late"),
            )
        )
    )
    assert code is grpc.StatusCode.INTERNAL
    large = client.message("GenerateRequest", text="a" * (1 << 20))
    assert status_of(lambda: client.call(generate, large))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_clients_end_requests(client: Client, server: Live, router: Any) -> None:
    """By cancelling the call, and by its id; only the own key's requests."""
    request = client.message(
        "GenerateRequest", text="count slowly", stopping={"max_new_tokens": 400}, request_id="mine"
    )
    call = client.call("vllm.Inference/GenerateStream", request)
    next(call)
    call.cancel()
    aborted = len(server.engine.aborted)
    call = client.call("vllm.Inference/GenerateStream", request)
    parts = [next(call)]
    rest = threading.Thread(target=lambda: parts.extend(call))
    rest.start()
    body = client.message("AbortRequest", request_ids=["mine"])
    client.call("vllm.Control/Abort", body, key=(("x-api-key", "k2"),))
    assert rest.is_alive()
    router.Abort(smg.AbortRequest(request_ids=["generate-mine", "unknown"]), metadata=KEY)
    rest.join(300)
    assert parts[-1].outputs.finish_info.finish_reason == 3
    assert len(server.engine.aborted) >= aborted
    with server.client(headers={"Authorization": "Bearer k2"}) as http:
        call = client.call("vllm.Inference/GenerateStream", request)
        parts = [next(call)]
        assert http.post("/abort_requests", json={}).json() == {"status": "aborted", "aborted": 1}
        assert list(call)[-1].outputs.finish_info.finish_reason == 3
        url = "/inference/v1/abort_requests"
        assert http.post(url, json={"request_ids": ["mine"]}).status_code == 200
        assert http.post(url, json={}).status_code == 400


def test_a_call_that_the_server_cancels_has_a_status(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grpcio sends none by itself: clients would wait until their own deadline."""

    async def cancelled(*_: Any, **__: Any) -> Any:
        raise asyncio.CancelledError

    async def cancelled_stream(*_: Any, **__: Any) -> Any:
        yield await cancelled()

    monkeypatch.setattr(HttpCalls, "call", cancelled)
    monkeypatch.setattr(HttpCalls, "stream", cancelled_stream)
    request = client.message("GenerateRequest", text="Hello")
    for call in (
        lambda: client.call("vllm.Inference/Generate", request),
        lambda: list(client.call("vllm.Inference/GenerateStream", request)),
    ):
        assert status_of(call)[0] is grpc.StatusCode.UNAVAILABLE


def test_the_service_of_routers(router: Any, tokenizer: Tokenizer, server: Live) -> None:
    ids = list(tokenizer.encode("Hello"))
    request = smg.GenerateRequest(request_id="r", tokenized={"input_ids": ids}, stream=True)
    request.sampling_params.max_tokens = 50
    request.sampling_params.logprobs = 1
    *chunks, last = [*router.Generate(request, metadata=KEY)]
    output = [token for one in chunks for token in one.chunk.token_ids]
    assert tokenizer.decode(output) == "Hello there."
    assert len(output) == last.complete.completion_tokens
    assert last.complete.finish_reason == "stop"
    request.stream = False
    (whole,) = router.Generate(request, metadata=KEY)
    assert list(whole.complete.output_ids) == output
    assert list(whole.complete.output_logprobs.token_ids) == output
    assert whole.complete.prompt_tokens == len(ids)
    model = router.GetModelInfo(smg.GetModelInfoRequest(), metadata=KEY)
    assert (model.served_model_name, model.max_context_length) == (
        "M", server.engine.info.max_model_len,
    )  # fmt: skip
    assert router.GetServerInfo(smg.GetServerInfoRequest(), metadata=KEY).server_type == "vllm-grpc"
    assert router.GetLoads(smg.GetLoadsRequest(), metadata=KEY).loads[0].dp_rank == 0
    assert router.FlushCache(common_pb2.FlushCacheRequest(), metadata=KEY).success
    assert router.HealthCheck(smg.HealthCheckRequest()).healthy
    code, _ = status_of(lambda: router.StopProfile(common_pb2.StopProfileRequest(), metadata=KEY))
    assert code is not grpc.StatusCode.OK


def test_embeddings_and_the_tokenizer(
    make_server: Callable[..., Live], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from modulm.testing.checkpoints import make_tokenizer

    folder = make_tokenizer(tmp_path, vocab=512)
    live = make_server({"tasks": ("embed",), "path": str(folder)}, grpc_port=0, runner="pooling")
    (family,) = (one for one in live.served.families if one.name == "grpc")
    with grpc.insecure_channel(f"127.0.0.1:{family.server.port}") as channel:  # type: ignore[attr-defined]
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        ids = list(tokenizer.encode("Hello"))
        answer = stub.Embed(smg.EmbedRequest(tokenized={"input_ids": ids}))
        with live.client() as http:
            body = {"model": "M", "input": [ids]}
            vector = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
        assert list(answer.embedding) == pytest.approx(vector)
        assert answer.embedding_dim == len(vector)
        chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
        data = b"".join(one.data for one in chunks)
        assert chunks[-1].sha256 == sha256(data).hexdigest()
        archive = zipfile.ZipFile(io.BytesIO(data))
        assert archive.read("tokenizer.json") == (folder / "tokenizer.json").read_bytes()


def test_control_and_health(client: Client, server: Live) -> None:
    info = client.call("vllm.Control/GetServerInfo", client.message("GetServerInfoRequest"))
    assert info.max_model_len == server.engine.info.max_model_len
    assert info.parallelism.world_size == 1
    model = client.call("vllm.Control/GetModelInfo", client.message("GetModelInfoRequest"))
    assert (model.served_model_name, list(model.served_model_aliases)) == ("M", ["alias"])
    sleeping = client.message("IsSleepingRequest")
    assert not client.call("vllm.Control/IsSleeping", sleeping).sleeping
    assert not client.call("vllm.Control/ListLoras", client.message("ListLorasRequest")).adapters
    for name, fields, code in (
        ("Shutdown", {}, grpc.StatusCode.FAILED_PRECONDITION),
        ("Sleep", {"level": 1}, grpc.StatusCode.INVALID_ARGUMENT),  # a scripted engine cannot
        ("StartDraftWeightUpdate", {}, grpc.StatusCode.UNIMPLEMENTED),
        ("LoadLora", {"lora_name": "a"}, grpc.StatusCode.UNIMPLEMENTED),
        ("UpdateWeightVersion", {"weight_version": "x"}, grpc.StatusCode.INVALID_ARGUMENT),
    ):
        request = client.message(f"{name}Request", **fields)
        path = f"vllm.Control/{name}"
        assert status_of(lambda p=path, r=request: client.call(p, r))[0] is code  # type: ignore[misc]
    sleep = client.message("SleepRequest", mode=2)
    assert status_of(lambda: client.call("vllm.Control/Sleep", sleep))[0] is not grpc.StatusCode.OK
    paused = client.call("vllm.Control/IsPaused", client.message("IsPausedRequest"))
    assert not paused.paused  # who asked would not know that it has to resume
    health = health_pb2_grpc.HealthStub(client.channel)
    for service in ("", "vllm.Inference", "vllm.grpc.engine.VllmEngine"):
        check = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert check.status == health_pb2.HealthCheckResponse.SERVING


def test_addresses(make_server: Callable[..., Live], client: Client, server: Live) -> None:
    """--grpc takes the port of HTTP; a used port and an open one without keys are errors."""
    (family,) = (one for one in server.served.families if one.name == "grpc")
    port = family.server.port  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="in use"):
        make_server(grpc_port=port)
    with pytest.raises(ConfigError, match="cannot be combined"):
        make_server(grpc=True, grpc_port=1)
    for flags, on_socket in (({"grpc": True}, True), ({"grpc_port": 0}, False)):
        config = with_http_address(EngineConfig.from_keywords(model="M", port=0, **flags))
        assert (config.group(ServerConfig).uds is not None) == on_socket
    with pytest.raises(ConfigError, match="in use"):
        with_http_address(EngineConfig.from_keywords(model="M", port=port, grpc=True))


def port_of(live: Live) -> int:
    (family,) = (one for one in live.served.families if one.name == "grpc")
    return int(family.server.port)  # type: ignore[attr-defined]


def stalled(channel: grpc.Channel, key: Any, ending: threading.Event) -> Any:
    """A call whose message does not come until `ending`."""

    def messages() -> Iterator[bytes]:
        ending.wait(300)
        yield from ()

    return channel.stream_stream("/vllm.Inference/Generate")(messages(), metadata=key, timeout=300)


def test_a_start_that_fails_half_way_can_be_stopped(server: Live) -> None:
    """grpcio ended the process: SIGSEGV. The error is thrown where the start first waits."""
    (family,) = (one for one in server.served.families if one.name == "grpc")

    async def main() -> None:
        other = GrpcServer(family.context, ("127.0.0.1", 0))
        starting = other.start().__await__()
        next(starting)
        with pytest.raises(OSError, match="no"):
            starting.throw(OSError("no"))
        await other.stop()

    asyncio.run(main())


def test_no_message_is_received_without_a_key(client: Client) -> None:
    ending = threading.Event()
    code, _ = status_of(lambda: next(stalled(client.channel, (), ending)))
    ending.set()
    assert code is grpc.StatusCode.UNAUTHENTICATED


def test_messages_are_as_large_as_the_models_context_allows() -> None:
    assert message_limit(1 << 12, 64 << 20) == 4 << 20
    assert message_limit(1 << 20, 64 << 20) == 16 << 20
    assert message_limit(1 << 20, 1 << 20) == 1 << 20


def test_a_small_message_becomes_no_large_one(client: Client, router: Any) -> None:
    """Compressed, it would be counted before it is decompressed."""
    request = smg.GenerateRequest(request_id="r", text="a" * (64 << 20))
    code, _ = status_of(
        lambda: list(
            router.Generate(request, metadata=KEY, timeout=300, compression=grpc.Compression.Gzip)
        )
    )
    assert code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert client.call(
        "vllm.Inference/Generate", client.message("GenerateRequest", text="Hello")
    ).outputs.text


def test_messages_at_once_and_connections_are_limited(make_server: Callable[..., Live]) -> None:
    """And one key leaves room for others."""
    live = make_server(
        grpc_port=0, api_key=("k1", "k2"), max_request_bytes=1 << 20, max_inflight_bytes=4 << 20,
        max_connections=16,
    )  # fmt: skip
    ending, ids = threading.Event(), [5, 6]
    with grpc.insecure_channel(f"127.0.0.1:{port_of(live)}") as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        waiting = [stalled(channel, KEY, ending) for _ in range(2)]

        def ask(key: str) -> Any:
            request = smg.GenerateRequest(request_id="r", tokenized={"input_ids": ids})
            return list(stub.Generate(request, metadata=(("x-api-key", key),), timeout=300))

        for _ in range(1000):  # until the server waits for both messages
            try:
                ask("k1")
            except grpc.RpcError as error:
                refused: Any = error
                break
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ("retry-after", "1") in refused.trailing_metadata()
        assert ask("k2")
        ending.set()
        for call in waiting:
            assert status_of(lambda call=call: next(call))[0] is not grpc.StatusCode.OK  # type: ignore[misc]
        assert ask("k1")
    with ExitStack() as stack:
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
        answers = []
        for _ in range(24):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(live)), 10))
            try:
                one.sendall(preface)
                answers.append(one.recv(1))
            except ConnectionError:
                answers.append(b"")
    assert 0 < sum(map(bool, answers)) <= 16


def test_the_largest_messages_hold_no_turn_of_the_loop(make_server: Callable[..., Live]) -> None:
    live = make_server({"max_model_len": 1 << 20}, grpc_port=0)
    with grpc.insecure_channel(f"127.0.0.1:{port_of(live)}") as channel:
        inference, stub = (
            channel.unary_unary("/vllm.Inference/Generate"),
            vllm_engine_pb2_grpc.VllmEngineStub(channel),
        )
        stub.HealthCheck(smg.HealthCheckRequest())
        request = GENERATE(text="a", decoding={"logit_bias": dict.fromkeys(range(300_000), 1.0)})
        tokens = GENERATE(token_ids={"ids": [5] * 2_000_000})
        for data in (request.SerializeToString(), tokens.SerializeToString()):
            beat = Beat(live.loop)
            code, _ = status_of(lambda data=data: inference(data, timeout=300))  # type: ignore[misc]
            assert beat.end() < BOUND
            assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A CA, and a key with the certificate that it signed for each of server and client."""
    folder = tmp_path_factory.mktemp("tls")
    now = datetime.now(UTC)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test CA")])
    files = {}
    for name in ("ca", "server", "client"):
        key = ca_key if name == "ca" else ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(ca_name if name == "ca" else subject)
            .issuer_name(ca_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=name == "ca", path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .sign(ca_key, SHA256())
        )
        files[name] = folder / f"{name}.pem"
        files[name].write_bytes(certificate.public_bytes(Encoding.PEM))
        files[f"{name}_key"] = folder / f"{name}.key"
        files[f"{name}_key"].write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )
    return files


def test_tls_with_certificates_of_clients(
    make_server: Callable[..., Live], certificates: dict[str, Path]
) -> None:
    """The server's certificate is checked by clients, theirs by the server."""
    files = {name: path.read_bytes() for name, path in certificates.items()}
    live = make_server(
        grpc_port=0, ssl_certfile=str(certificates["server"]),
        ssl_keyfile=str(certificates["server_key"]), ssl_ca_certs=str(certificates["ca"]),
        ssl_cert_reqs=ssl.CERT_REQUIRED,
    )  # fmt: skip
    (family,) = (one for one in live.served.families if one.name == "grpc")
    address = f"localhost:{family.server.port}"  # type: ignore[attr-defined]

    def serves(**options: Any) -> bool:
        credentials = grpc.ssl_channel_credentials(**options) if options else None
        opened = (
            grpc.insecure_channel(address)
            if credentials is None
            else grpc.secure_channel(address, credentials)
        )
        with opened as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            try:
                return bool(stub.HealthCheck(smg.HealthCheckRequest(), timeout=300).healthy)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                return False

    known = {"private_key": files["client_key"], "certificate_chain": files["client"]}
    assert serves(root_certificates=files["ca"], **known)
    assert not serves(root_certificates=files["ca"])  # no certificate of its own
    assert not serves(root_certificates=files["client"], **known)  # trusts another CA
    assert not serves()
    with pytest.raises(ConfigError, match="ssl-ca-certs"):
        _credentials(
            ServerConfig(
                ssl_certfile=str(certificates["server"]),
                ssl_keyfile=str(certificates["server_key"]),
                ssl_cert_reqs=ssl.CERT_REQUIRED,
            )
        )
