"""Describes the served model in Ollama's form."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import modulm

if TYPE_CHECKING:
    from modulm_route_ollama.objects import (
        Details,
        Model,
        ModelShown,
        Running,
        RunningModels,
        Version,
    )
    from modulm_server.route import RouteContext

__all__ = ["Catalogue"]

#: The model is never unloaded.
_NEVER = "9999-12-31T23:59:59Z"


class Catalogue:
    """The served model under each of its names."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._info = context.engine.info
        created = datetime.fromtimestamp(context.created, UTC)
        self._created_at = created.isoformat().replace("+00:00", "Z")

    def version(self) -> Version:
        return {"version": modulm.__version__}

    def list_models(self) -> list[Model]:
        """List each served name as a model."""
        return [self._model(name) for name in self._context.models]

    def running(self) -> RunningModels:
        models: list[Running] = [
            {
                **model,
                "expires_at": _NEVER,
                "size_vram": model["size"],
                "context_length": self._info.max_model_len,
            }
            for model in self.list_models()
        ]
        return {"models": models}

    def model_details(self) -> ModelShown:
        """The response of `/api/show`. The Modelfile is only a comment."""
        info, tokenizer = self._info, self._context.engine.tokenizer
        template = self._context.generation.template
        if template is None and tokenizer is not None and isinstance(tokenizer.chat_template, str):
            template = tokenizer.chat_template
        table: dict[str, Any] = {
            "general.architecture": info.architecture,
            f"{info.architecture}.context_length": info.max_model_len,
            f"{info.architecture}.embedding_length": info.hidden,
        }
        return {
            "modelfile": f"# modulm serve {self._context.models[0]}\n",
            "parameters": "\n".join(f"{name} {value}" for name, value in info.defaults.items()),
            "template": template or "",
            "details": self._details(),
            "model_info": table,
            "capabilities": self._capabilities(),
            "modified_at": self._created_at,
        }

    def _capabilities(self) -> list[str]:
        info = self._info
        if "generate" not in info.tasks:
            return ["embedding"]
        capabilities = ["completion"]
        if info.config.tool_calls.tool_call_parser:
            capabilities.append("tools")
        if info.config.structured_outputs.reasoning_parser:
            capabilities.append("thinking")
        return capabilities

    def _details(self) -> Details:
        decisions = {d.subject: d.winner or "none" for d in self._info.description.decisions}
        method = decisions.get("quantization", "none")
        return {
            "parent_model": "",
            "format": decisions.get("loader", ""),
            "family": self._info.architecture,
            "families": [self._info.architecture],
            "parameter_size": "",
            "quantization_level": self._info.dtype if method == "none" else method,
        }

    def _model(self, name: str) -> Model:
        return {
            "name": name,
            "model": name,
            "modified_at": self._created_at,
            "size": self._info.description.weight_bytes,
            "digest": sha256(f"{name} {self._info.path}".encode()).hexdigest(),
            "details": self._details(),
        }
