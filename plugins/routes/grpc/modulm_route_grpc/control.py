"""The service `vllm.Control`: facts, adapters, pauses, sleep and weight updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import grpc

import modulm
from modulm_route_grpc.descriptors import message
from modulm_route_grpc.http_calls import Call, CallFailed, HttpCalls
from modulm_route_grpc.inference import invalid, json_object
from modulm_server.flags import ServerConfig

if TYPE_CHECKING:
    from modulm_server.route import RouteContext

__all__ = ["Control"]

_TAGS = 64
#: Of a version of weights.
_DIGITS = 18
_MODES = {0: "abort", 1: "abort", 2: "wait", 3: "keep"}


class Control:
    """Answers through the HTTP routes, which need --server-dev-mode where these say so."""

    def __init__(self, context: RouteContext, calls: HttpCalls) -> None:
        self._context = context
        self._calls = calls

    async def GetServerInfo(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Facts about the engine."""
        await self._models(call)
        info = self._context.engine.info
        config = info.config
        parallel, scheduler = config.parallel, config.scheduler
        transfer = config.value("weight_transfer_config") or {}
        return message("ServerInfo")(
            engine_version=modulm.__version__,
            api_version="vllm",
            parallelism=message("ParallelismInfo")(
                tensor_parallel_size=parallel.tensor_parallel_size,
                pipeline_parallel_size=parallel.pipeline_parallel_size,
                data_parallel_size=parallel.data_parallel_size,
                data_parallel_rank=config.value("data_parallel_rank") or 0,
                decode_context_parallel_size=parallel.decode_context_parallel_size,
                world_size=parallel.ranks * parallel.data_parallel_size,
                data_parallel_size_local=parallel.data_parallel_size_local
                or parallel.data_parallel_size,
            ),
            max_model_len=info.max_model_len,
            kv_block_size=info.block_size,
            total_kv_blocks=info.cache_tokens // info.block_size if info.block_size else 0,
            max_running_requests=scheduler.max_num_seqs or 0,
            max_batched_tokens=scheduler.max_num_batched_tokens or 0,
            max_loras=info.limit("adapters", "slots"),
            rl_capabilities=message("RlCapabilities")(
                weight_transfer_enabled=self._developing,
                weight_transfer_backend=str(transfer.get("backend", "")),
                sleep_mode_enabled=self._developing,
            ),
            effective_attention_block_size=info.block_size or None,
        )

    @property
    def _developing(self) -> bool:
        return self._context.config.group(ServerConfig).server_dev_mode

    async def GetModelInfo(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Facts about the model."""
        await self._models(call)
        info = self._context.engine.info
        config = info.config
        return message("ModelInfo")(
            model_id=config.model.model,
            served_model_name=self._context.models[0],
            served_model_aliases=self._context.models[1:],
            supports_text_input=self._context.engine.tokenizer is not None,
            supports_token_ids_input=True,
            supports_lora=bool(info.limit("adapters", "slots")),
            supports_multimodal=bool(info.limit("media", "items")),
            reasoning_parser=config.structured_outputs.reasoning_parser or "",
            tool_call_parser=config.tool_calls.tool_call_parser or "",
        )

    async def Shutdown(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Refused: who started the server ends it."""
        raise CallFailed(
            grpc.StatusCode.FAILED_PRECONDITION,
            "this server does not end itself: send SIGTERM to its process",
        )

    async def Abort(self, request: Any, call: Call) -> Any:  # noqa: N802
        """End requests by their ids."""
        ids: list[str] = await call.convert(list, request.request_ids)
        body = {"request_ids": ids}
        await self._calls.call(call, "POST", "/inference/v1/abort_requests", body)
        return message("AbortResponse")()

    # Adapters.

    async def LoadLora(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Load an adapter; needs --allow-runtime-lora-updating."""
        body = {"lora_name": request.lora_name, "lora_path": request.source_path}
        await self._calls.call(call, "POST", "/v1/load_lora_adapter", body)
        adapter = message("LoraAdapter")(
            lora_name=request.lora_name, source_path=request.source_path
        )
        return message("LoadLoraResponse")(adapter=adapter)

    async def UnloadLora(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Unload an adapter; needs --allow-runtime-lora-updating."""
        body = {"lora_name": request.lora_name}
        await self._calls.call(call, "POST", "/v1/unload_lora_adapter", body)
        adapter = message("LoraAdapter")(lora_name=request.lora_name)
        return message("UnloadLoraResponse")(adapter=adapter)

    async def ListLoras(self, request: Any, call: Call) -> Any:  # noqa: N802
        """The adapters that the key may use. Their ids are names: lora_id is 0."""
        adapters = [
            message("LoraAdapter")(lora_name=model["id"], source_path=model.get("root") or "")
            for model in await self._models(call)
            if model["id"] not in self._context.models
        ]
        return message("ListLorasResponse")(adapters=adapters)

    async def _models(self, call: Call) -> list[dict[str, Any]]:
        """The served models and adapters, which only who has a key may see."""
        models: list[dict[str, Any]] = (await self._calls.call(call, "GET", "/v1/models"))["data"]
        return models

    async def GetKvEventSources(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Where events of the KV cache are published."""
        sources = [
            message("KvEventSource")(
                transport="zmq",
                endpoint=source["endpoint"],
                topic=source["topic"],
                replay_endpoint=source["replay_endpoint"] or "",
                data_parallel_rank=source["data_parallel_rank"],
                encoding="msgpack",
            )
            for source in await self._calls.call(call, "GET", "/kv_event_sources")
        ]
        return message("GetKvEventSourcesResponse")(sources=sources)

    # With --server-dev-mode.

    async def PauseGeneration(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Pause generation."""
        clears = request.clear_cache if request.HasField("clear_cache") else True
        query = urlencode({"mode": _mode(request.mode), "clear_cache": str(clears).lower()})
        await self._calls.call(call, "POST", "/pause", query=query)
        return message("PauseGenerationResponse")()

    async def ResumeGeneration(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Resume generation."""
        await self._calls.call(call, "POST", "/resume")
        return message("ResumeGenerationResponse")()

    async def IsPaused(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Whether generation is paused."""
        answer = await self._calls.call(call, "GET", "/is_paused")
        return message("IsPausedResponse")(paused=answer["is_paused"])

    async def Sleep(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Free memory. Running requests are handled by the mode first."""
        if request.mode:
            query = urlencode({"mode": _mode(request.mode), "clear_cache": "false"})
            await self._calls.call(call, "POST", "/pause", query=query)
        level = request.level if request.HasField("level") else 1
        try:
            await self._calls.call(call, "POST", "/sleep", query=urlencode({"level": level}))
        finally:  # it also goes on if it cannot sleep
            if request.mode:
                await self._calls.call(call, "POST", "/resume")
        return message("SleepResponse")()

    async def WakeUp(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Allocate memory again."""
        if len(request.tags) > _TAGS:
            raise invalid("tags", f"has more than {_TAGS} entries")
        query = urlencode([("tags", tag) for tag in request.tags])
        await self._calls.call(call, "POST", "/wake_up", query=query)
        return message("WakeUpResponse")()

    async def IsSleeping(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Whether the engine sleeps."""
        answer = await self._calls.call(call, "GET", "/is_sleeping")
        return message("IsSleepingResponse")(sleeping=answer["is_sleeping"])

    async def InitWeightTransferEngine(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Connect the workers to the trainer."""
        text = request.init_info_json or b"{}"
        info = await call.convert(json_object, text, "init_info_json")
        await self._calls.call(call, "POST", "/init_weight_transfer_engine", {"init_info": info})
        return message("InitWeightTransferEngineResponse")()

    async def StartWeightUpdate(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Begin an update of the weights."""
        await self._calls.call(call, "POST", "/start_weight_update", {})
        return message("StartWeightUpdateResponse")()

    async def UpdateWeights(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Receive tensors of the current update."""
        info = await call.convert(json_object, request.update_info_json, "update_info_json")
        await self._calls.call(call, "POST", "/update_weights", {"update_info": info})
        return message("UpdateWeightsResponse")()

    async def FinishWeightUpdate(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Switch to the new weights, and set their version if the request has one."""
        version = _version(request) if request.HasField("weight_version") else None
        await self._calls.call(call, "POST", "/finish_weight_update")
        if version is not None:
            await self._set_version(call, version)
        return message("FinishWeightUpdateResponse")()

    async def UpdateWeightVersion(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Set the version of the weights."""
        await self._set_version(call, _version(request))
        return message("UpdateWeightVersionResponse")()

    async def _set_version(self, call: Call, version: int) -> None:
        body = {"weight_version": version}
        await self._calls.call(call, "POST", "/update_weight_version", body)

    async def GetWeightVersion(self, request: Any, call: Call) -> Any:  # noqa: N802
        """The version of the weights."""
        answer = await self._calls.call(call, "GET", "/weight_info")
        return message("GetWeightVersionResponse")(weight_version=str(answer["weight_version"]))


def _mode(number: int) -> str:
    if number not in _MODES:
        raise invalid("mode", "must be ABORT, WAIT or KEEP")
    return _MODES[number]


def _version(request: Any) -> int:
    """The version of weights, which modulm numbers. Raises CallFailed."""
    if not request.weight_version.isdecimal() or len(request.weight_version) > _DIGITS:
        raise invalid("weight_version", "must be a number: modulm counts versions of weights")
    return int(request.weight_version)
