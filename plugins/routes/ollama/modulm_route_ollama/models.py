"""Describes the served model in Ollama's form."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import modulm
from modulm_route_ollama.modelfile import parameter_lines, read_modelfile
from modulm_route_ollama.parameters import parameter_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from modulm.contracts.engine_info import EngineInfo
    from modulm_route_ollama.library import Library
    from modulm_route_ollama.objects import (
        Details,
        Model,
        ModelShown,
        Running,
        RunningModels,
        Version,
    )
    from modulm_server.directory import ModelStatus
    from modulm_server.route import RouteContext

__all__ = ["Catalogue"]

#: The version of Ollama whose API these routes have. Clients refuse versions that are too low for
#: them (VS Code those below 0.6.4), or that are not numbers alone.
_API = "0.12.11"
#: States of models that have an engine.
_IN_MEMORY = frozenset({"loaded", "sleeping", "stopping"})
#: The model is never unloaded.
_NEVER = "9999-12-31T23:59:59Z"


class Catalogue:
    """The served model under each of its names."""

    def __init__(self, context: RouteContext, library: Library) -> None:
        self._context = context
        self._library = library
        self._info = context.engine.info
        created = datetime.fromtimestamp(context.created, UTC)
        self._created_at = created.isoformat().replace("+00:00", "Z")

    def version(self) -> Version:
        return {"version": _API, "modulm": modulm.__version__}

    def list_models(self, owner: str = "") -> list[Model]:
        """List each served name as a model. owner: of the request."""
        directory = self._context.directory
        if directory is None:
            return [self._model(name) for name in self._context.models]
        statuses = directory.statuses(owner)
        return [self._model_of(name, status) for status in statuses for name in status.names]

    def running(self, owner: str = "") -> RunningModels:
        if self._context.directory is not None:
            return {"models": self._loaded(self._context.directory.statuses(owner))}
        models: list[Running] = [
            {
                **model,
                "expires_at": _NEVER,
                "size_vram": model["size"],
                "context_length": self._info.max_model_len,
                "last_used_at": None,
                "pinned": True,
            }
            for model in self.list_models()
        ]
        return {"models": models}

    def _loaded(self, statuses: Iterable[ModelStatus]) -> list[Running]:
        """The models in memory, by their names without aliases."""
        models: list[Running] = []
        for status in statuses:
            if status.state in _IN_MEMORY and status.info is not None:
                running: Running = {
                    **self._model_of(status.name, status),
                    "expires_at": _time(status.expires_at) or _NEVER,
                    "size_vram": status.memory,
                    "context_length": status.info.max_model_len,
                    "last_used_at": _time(status.last_used),
                    "pinned": status.pinned,
                }
                models.append(running)
        return models

    def _model_of(self, name: str, status: ModelStatus) -> Model:
        """A model of a server of several. size: its memory, or the estimate of it."""
        return {
            "name": name,
            "model": name,
            "modified_at": self._created_at,
            "size": status.memory,
            "digest": sha256(f"{name} {status.model}".encode()).hexdigest(),
            "details": _details(status.info),
            "state": status.state,
        }

    def cold_details(self, status: ModelStatus) -> ModelShown:
        """The response of `/api/show` for a model that is not loaded: what is known without it."""
        info = status.info
        answer: ModelShown = {
            "modelfile": f"# modulm serve {status.model}\n",
            "parameters": "",
            "template": "",
            "details": _details(info),
            "model_info": {} if info is None else _facts(info),
            "capabilities": [] if info is None else _capabilities(info),
            "modified_at": self._created_at,
        }
        return self._with_modelfile(answer, status.name)

    def model_details(self, name: str) -> ModelShown:
        """The response of `/api/show`. The Modelfile is only a comment, unless the model was
        created with one.
        """
        info, tokenizer = self._info, self._context.engine.tokenizer
        template = self._context.generation.template
        if template is None and tokenizer is not None and isinstance(tokenizer.chat_template, str):
            template = tokenizer.chat_template
        answer: ModelShown = {
            "modelfile": f"# modulm serve {self._context.models[0]}\n",
            "parameters": "\n".join(f"{name} {value}" for name, value in info.defaults.items()),
            "template": template or "",
            "details": _details(info),
            "model_info": _facts(info),
            "capabilities": _capabilities(info),
            "modified_at": self._created_at,
        }
        return self._with_modelfile(answer, name)

    def _with_modelfile(self, answer: ModelShown, name: str) -> ModelShown:
        """Put what a model was created with into a response of `/api/show`."""
        text = self._library.described(name)
        if text is None:
            return answer
        read = read_modelfile(text)
        answer["modelfile"] = text
        answer["template"] = read.template or answer["template"]
        answer["parameters"] = parameter_lines(read.parameters) or answer["parameters"]
        if read.system:
            answer["system"] = read.system
        if read.license:
            answer["license"] = "\n".join(read.license)
        return answer

    def _model(self, name: str) -> Model:
        return {
            "name": name,
            "model": name,
            "modified_at": self._created_at,
            "size": self._info.description.weight_bytes,
            "digest": sha256(f"{name} {self._info.path}".encode()).hexdigest(),
            "details": _details(self._info),
        }


def _capabilities(info: EngineInfo) -> list[str]:
    if "generate" not in info.tasks:
        return ["embedding"]
    capabilities = ["completion"]
    if info.config.tool_calls.tool_call_parser:
        capabilities.append("tools")
    if info.config.structured_outputs.reasoning_parser:
        capabilities.append("thinking")
    return capabilities


def _facts(info: EngineInfo) -> dict[str, Any]:
    return {
        "general.architecture": info.architecture,
        f"{info.architecture}.context_length": info.max_model_len,
        f"{info.architecture}.embedding_length": info.hidden,
    }


def _details(info: EngineInfo | None) -> Details:
    """info: None if the model was never loaded."""
    architecture = "" if info is None else info.architecture
    decisions = {} if info is None else {d.subject: d.winner for d in info.description.decisions}
    method = decisions.get("quantization") or "none"
    dtype = "" if info is None else info.dtype
    return {
        "parent_model": "",
        "format": decisions.get("loader") or "",
        "family": architecture,
        "families": [architecture],
        "parameter_size": "" if info is None else parameter_size(info.path),
        "quantization_level": dtype if method == "none" else method,
    }


def _time(seconds: float | None) -> str | None:
    return (
        None
        if seconds is None
        else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    )
