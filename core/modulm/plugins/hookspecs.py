"""The hooks that plugins may implement.

A hook plugin is a module (or object) in the entry-point group `modulm` whose functions are marked
with `modulm.plugins.hookimpl`. Implementations may omit arguments that they do not need. pluggy
calls them, the plugin registered last first, unless `tryfirst`, `trylast` or `wrapper=True` change
the order. If an implementation raises, this is logged and its plugin disabled, and the other
results are used, except in the hooks of `STOPPING`. No hook is called per token or per layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from modulm.plugins.declaration import Check, Choice, Declaration, Proposal

if TYPE_CHECKING:
    from pathlib import Path

    from modulm.contracts.adapter import AdapterBank
    from modulm.contracts.attention import AttentionSpec
    from modulm.contracts.checkpoint import WantedFiles
    from modulm.contracts.drafter import Drafter
    from modulm.contracts.kernels import Ops
    from modulm.contracts.platform import Platform, Probe
    from modulm.contracts.pooling import PoolingRecipe
    from modulm.contracts.quantization import CheckpointInfo
    from modulm.contracts.request_listener import RequestListener
    from modulm.contracts.sampling import LogitsProcessor, PoolingParams, SamplingParams

__all__ = [
    "STOPPING", "hookimpl", "hookspec", "modulm_adapter_bank", "modulm_app_created",
    "modulm_attention", "modulm_choose_attention", "modulm_choose_model", "modulm_choose_parser",
    "modulm_choose_platform", "modulm_choose_quantization", "modulm_config_final",
    "modulm_config_proposals", "modulm_doctor_checks", "modulm_drafter", "modulm_engine_failed",
    "modulm_engine_started", "modulm_engine_stopping", "modulm_explain_folder",
    "modulm_explain_model", "modulm_fetch_checkpoint", "modulm_logits_steps", "modulm_model_built",
    "modulm_model_loaded", "modulm_models", "modulm_parsers", "modulm_platforms", "modulm_pooling",
    "modulm_quantization", "modulm_report_header", "modulm_request_admitted",
    "modulm_request_finished", "modulm_request_listeners", "modulm_step_finished",
]  # fmt: skip

#: Hooks in which an exception stops the operation.
STOPPING = frozenset(
    {
        "modulm_adapter_bank",
        "modulm_app_created",
        "modulm_config_final",
        "modulm_drafter",
        "modulm_fetch_checkpoint",
        "modulm_model_built",
        "modulm_model_loaded",
        "modulm_pooling",
        "modulm_request_listeners",
    }
)

hookspec = pluggy.HookspecMarker("modulm")
hookimpl = pluggy.HookimplMarker("modulm")


# Declarations: called once, when the hook plugins are loaded.


@hookspec
def modulm_models() -> Sequence[Declaration]:  # type: ignore[empty-body]
    """Declare model architectures in addition to those in entry points.

    Called once, when hook plugins are loaded. If one declaration of a plugin is malformed, none of
    its declarations is used.
    """


@hookspec
def modulm_attention() -> Sequence[Declaration]:  # type: ignore[empty-body]
    """Declare attention backends. Called once, like `modulm_models`."""


@hookspec
def modulm_quantization() -> Sequence[Declaration]:  # type: ignore[empty-body]
    """Declare quantization methods. Called once, like `modulm_models`."""


@hookspec
def modulm_platforms() -> Sequence[Declaration]:  # type: ignore[empty-body]
    """Declare platforms. Called once, like `modulm_models`."""


@hookspec
def modulm_parsers() -> Sequence[Declaration]:  # type: ignore[empty-body]
    """Declare tool and reasoning parsers; each declaration must set `kind`.

    Called once, like `modulm_models`.
    """


# Choices: called if the user left the choice open; the first result that is not None is used.


@hookspec(firstresult=True)
def modulm_choose_model(architectures: Sequence[str], config: Mapping[str, Any]) -> Choice | None:
    """Choose the driver that runs a checkpoint, for example a variant for one fine-tune.

    `architectures` are the names in config.json, `config` is the whole file. First result. Called
    once per engine. By default the first installed architecture is used.
    """


@hookspec(firstresult=True)
def modulm_choose_attention(spec: AttentionSpec, platform: Platform, ops: Ops) -> Choice | None:
    """Choose the attention backend for the layers of one spec.

    `spec` is the `AttentionSpec`, `platform` the platform in use, `ops` the model's ops. First
    result. Called once per distinct spec if `--attention-backend` is not set; the chosen backend
    must still accept the spec.
    """


@hookspec(firstresult=True)
def modulm_choose_quantization(checkpoint: CheckpointInfo, platform: Platform) -> Choice | None:
    """Choose the quantization method of a checkpoint.

    `checkpoint` is its `CheckpointInfo`, `platform` the platform in use. First result. Called once
    per engine if `--quantization` is not set. By default the method that claims the checkpoint is
    used.
    """


@hookspec(firstresult=True)
def modulm_choose_platform(probes: Mapping[str, Probe]) -> Choice | None:
    """Choose the platform, given the probe of each installed one.

    `probes` maps names to `Probe`s. First result. Called once per process if `--device` is "auto".
    By default the highest score is used.
    """


@hookspec(firstresult=True)
def modulm_choose_parser(kind: str, checkpoint: CheckpointInfo) -> Choice | None:
    """Choose the parser for a model's output.

    `kind` is "tool_parsers" or "reasoning_parsers", `checkpoint` the model's `CheckpointInfo`.
    First result. Called once per served model and kind if the flag is not set. By default the best
    match by the packages' declarations (`fits.toml`) is used.
    """


@hookspec(firstresult=True)
def modulm_pooling(checkpoint: Any, config: Any) -> PoolingRecipe | None:
    """Read pooling settings from a checkpoint's files.

    `checkpoint` is a `modulm.contracts.checkpoint.Checkpoint` (its folder in `path`, config.json in
    `config`), `config` the EngineConfig. First result. Called when an engine starts, unless
    `--runner generate` is set; read no weights here. Raising stops the start.
    """


@hookspec(firstresult=True)
def modulm_fetch_checkpoint(name: str, config: Any, files: WantedFiles) -> Path | None:
    """Download a checkpoint, an adapter or a tokenizer and return its folder (or file).

    `name` is what the user wrote, such as `owner/name` or `s3://bucket/folder`; it is not a local
    path. `config` is the EngineConfig (`revision`, `download_dir`, `ignore_patterns`), `files` a
    `modulm.contracts.checkpoint.WantedFiles`. Return None for names of other sources. First result.
    Called in every process that opens the checkpoint, so a second call should find everything in a
    local cache. Raising stops the start.
    """


@hookspec(firstresult=True)
def modulm_explain_folder(folder: Path) -> str | None:
    """Say what a `folder` without config.json holds, with advice.

    For example "an adapter, not a model: serve its model with --flag". First result. Called when
    such a folder was given as a model; the answer becomes a part of the error.
    """


@hookspec(firstresult=True)
def modulm_explain_model(config: Mapping[str, Any]) -> str | None:
    """Say what kind of model no installed package supports, with advice.

    `config` is its config.json. For example "a speech model: use transcripts". First result.
    Called when no driver has the architecture; the answer becomes a part of the error. None for
    kinds that the plugin does not know; then the error names only the architecture.
    """


# Configuration.


@hookspec
def modulm_config_proposals(config: Any) -> Sequence[Proposal] | None:
    """Propose values for flags that the user left open.

    `config` is the draft EngineConfig, in which an open flag is None. Called once per engine,
    before defaults are computed. Different proposals of two plugins for one flag are an error.
    """


@hookspec(historic=True)
def modulm_config_final(config: Any) -> None:
    """Called when the engine's configuration is final.

    `config` is the frozen EngineConfig. Historic: plugins that are registered later are called as
    well. Raising stops the engine from starting.
    """


# Model and engine.


@hookspec
def modulm_model_built(model: Any, config: Any, fillers: Any, platform: Any) -> None:
    """Called when the model's modules exist but have no weights yet.

    `model` is a `modulm.contracts.model.Model`, `config` the EngineConfig. `fillers` is a list: the
    first function that a plugin appends to it reads the weights instead of
    `modulm.loading.weights.fill`, with the same arguments, and they need not fit the free memory.
    `platform` is the model's `Platform`. Called in the process that runs the model. Raising stops
    the load.
    """


@hookspec
def modulm_model_loaded(model: Any, config: Any) -> None:
    """Called when the model's weights are loaded and repacked, before the first step.

    `model`, `config` and process as in `modulm_model_built`. Raising stops the load.
    """


@hookspec(firstresult=True)
def modulm_drafter(
    config: Any, model: Any, platform: Any, loaded: Any, mesh: Any
) -> Drafter | None:
    """Create the `modulm.contracts.drafter.Drafter` that proposes tokens for the model to verify.

    `config` is the EngineConfig, `model` the loaded `modulm.contracts.model.Model`, `platform` its
    `Platform`, `loaded` its `modulm.loading.Loaded`, `mesh` the ranks that share it. First result.
    Called in each process that runs the model, after its weights are loaded, unless
    `--plugin-config` has a table for a speculator. Raising stops the start.
    """


@hookspec(firstresult=True)
def modulm_adapter_bank(config: Any, platform: Any, ops: Any) -> AdapterBank | None:
    """Create the `modulm.contracts.adapter.AdapterBank` of the model.

    `config` is the EngineConfig, `platform` the model's `Platform`, `ops` its ops. First result.
    Called in the process that runs the model, before its layers are built, unless `--plugin-config`
    has a table for a bank. Raising stops the start.
    """


@hookspec
def modulm_engine_started(config: Any) -> None:
    """Called when the engine is ready, in its process. `config`: EngineConfig. Notice."""


@hookspec
def modulm_engine_stopping() -> None:
    """Called before the engine stops; running requests will be aborted. Notice."""


@hookspec
def modulm_engine_failed(error: BaseException) -> None:
    """Called when the engine has failed because of `error`. Notice."""


# Requests and steps.


@hookspec
def modulm_request_admitted(request: str, params: SamplingParams | PoolingParams) -> None:
    """Called when a request is admitted and runs in this step.

    `request` is its id, `params` its sampling or pooling parameters. Called again when a preempted
    request is readmitted. Notice, in the engine's loop: must be fast.
    """


@hookspec
def modulm_request_finished(request: str, reason: str) -> None:
    """Called when the request with id `request` has ended.

    `reason` is "stop", "length", "abort" or "error". Notice.
    """


@hookspec
def modulm_logits_steps(config: Any, vocabulary: int) -> Sequence[LogitsProcessor]:  # type: ignore[empty-body]
    """Return logits processors for all requests of the engine.

    `config` is the EngineConfig, `vocabulary` the width of the logits. Called once, when the
    sampler is built, which then calls the processors in order.
    """


@hookspec
def modulm_step_finished(stats: Any) -> None:
    """Called after each step. `stats`: `modulm.contracts.requests.StepStats`. Must be fast."""


# Front ends.


@hookspec
def modulm_request_listeners(config: Any) -> Sequence[RequestListener]:  # type: ignore[empty-body]
    """Return listeners that are called for each request that has ended.

    `config` is the EngineConfig. A listener gets a `modulm.contracts.outputs.Finished`; its
    `origin` is the value of `modulm_frontend.origin.request_origin` when the request was made.
    Called once per front end, when it starts. Listeners must be fast; one that raises is not called
    again. Raising in the hook stops the start.
    """


@hookspec
def modulm_app_created(app: Any, config: Any) -> None:
    """Extend the HTTP application before it is served: routes, middleware, exception handlers.

    `app` is a FastAPI object, `config` the EngineConfig. Raising stops the server.
    """


@hookspec
def modulm_report_header(config: Any) -> Sequence[str]:  # type: ignore[empty-body]
    """Return lines for the banner of `modulm serve` and for `modulm collect-env`.

    `config` is the EngineConfig, or None.
    """


@hookspec
def modulm_doctor_checks() -> Sequence[Check]:  # type: ignore[empty-body]
    """Return checks for `modulm plugins doctor` of the plugin's requirements."""
