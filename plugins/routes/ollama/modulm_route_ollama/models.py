"""What Ollama's clients are told of the model that is served."""

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

#: The model never goes while the server runs.
_NEVER = "9999-12-31T23:59:59Z"


class Catalogue:
    """The served model under each of its names."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._info = context.engine.info
        made = datetime.fromtimestamp(context.created, UTC)
        self._made = made.isoformat().replace("+00:00", "Z")

    def version(self) -> Version:
        return {"version": modulm.__version__}

    def listed(self) -> list[Model]:
        """Each name as a model."""
        return [self._model(name) for name in self._context.models]

    def running(self) -> RunningModels:
        found: list[Running] = [
            {
                **model,
                "expires_at": _NEVER,
                "size_vram": model["size"],
                "context_length": self._info.max_model_len,
            }
            for model in self.listed()
        ]
        return {"models": found}

    def shown(self) -> ModelShown:
        """`/api/show`. There is no Modelfile: a checkpoint says by itself what it is."""
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
            "capabilities": self._abilities(),
            "modified_at": self._made,
        }

    def _abilities(self) -> list[str]:
        info = self._info
        if "generate" not in info.tasks:
            return ["embedding"]
        able = ["completion"]
        if info.config.tool_calls.tool_call_parser:
            able.append("tools")
        if info.config.structured_outputs.reasoning_parser:
            able.append("thinking")
        return able

    def _details(self) -> Details:
        won = {d.subject: d.winner or "none" for d in self._info.description.decisions}
        method = won.get("quantization", "none")
        return {
            "parent_model": "",
            "format": won.get("loader", ""),
            "family": self._info.architecture,
            "families": [self._info.architecture],
            "parameter_size": "",
            "quantization_level": self._info.dtype if method == "none" else method,
        }

    def _model(self, name: str) -> Model:
        return {
            "name": name,
            "model": name,
            "modified_at": self._made,
            "size": self._info.description.weight_bytes,
            "digest": sha256(f"{name} {self._info.path}".encode()).hexdigest(),
            "details": self._details(),
        }
