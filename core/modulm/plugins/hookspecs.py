"""The questions and notices that plugins may answer. One module, one docstring each.

A hook plugin is a module (or object) named in the entry-point group `modulm` whose functions are
marked with `modulm.plugins.hookimpl`. An implementation may leave out arguments it does not need.
pluggy calls them: the plugin that was registered last is asked first, unless `tryfirst`, `trylast`
or `wrapper=True` say otherwise. An implementation that raises is reported and its plugin switched
off, and the others' answers count, except in the hooks of `STOPPING`. No hook is called per token
or per layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from modulm.plugins.declaration import Check, Choice, Declaration, Proposal

if TYPE_CHECKING:
    from modulm.contracts.adapter import AdapterBank
    from modulm.contracts.attention import AttentionSpec
    from modulm.contracts.drafter import Drafter
    from modulm.contracts.kernels import Ops
    from modulm.contracts.platform import Platform, Probe
    from modulm.contracts.pooling import PoolingRecipe
    from modulm.contracts.quantization import CheckpointInfo
    from modulm.contracts.request_listener import RequestListener
    from modulm.contracts.sampling import LogitsProcessor, PoolingParams, SamplingParams

__all__ = [
    "STOPPING",
    "hookimpl",
    "hookspec",
    "modulm_adapter_bank",
    "modulm_app_created",
    "modulm_attention",
    "modulm_choose_attention",
    "modulm_choose_model",
    "modulm_choose_parser",
    "modulm_choose_platform",
    "modulm_choose_quantization",
    "modulm_config_final",
    "modulm_config_proposals",
    "modulm_doctor_checks",
    "modulm_drafter",
    "modulm_engine_failed",
    "modulm_engine_started",
    "modulm_engine_stopping",
    "modulm_logits_steps",
    "modulm_model_built",
    "modulm_model_loaded",
    "modulm_models",
    "modulm_parsers",
    "modulm_platforms",
    "modulm_pooling",
    "modulm_quantization",
    "modulm_report_header",
    "modulm_request_admitted",
    "modulm_request_finished",
    "modulm_request_listeners",
    "modulm_step_finished",
]

#: Hooks in which raising stops what they are told of.
STOPPING = frozenset(
    {
        "modulm_adapter_bank",
        "modulm_app_created",
        "modulm_config_final",
        "modulm_drafter",
        "modulm_model_built",
        "modulm_model_loaded",
        "modulm_pooling",
        "modulm_request_listeners",
    }
)

hookspec = pluggy.HookspecMarker("modulm")
hookimpl = pluggy.HookimplMarker("modulm")


# What there is: declared once, when the hook plugins are loaded.


@hookspec
def modulm_models() -> Sequence[Declaration]:  # type: ignore[empty-body]
    """Model architectures that the plugin offers beside its entry points.

    Called once, when hook plugins are loaded. The declarations of one plugin are checked and
    taken over together or, if one is malformed, not at all.
    """


@hookspec
def modulm_attention() -> Sequence[Declaration]:  # type: ignore[empty-body]
    """Attention backends that the plugin offers. Called once, as `modulm_models` is."""


@hookspec
def modulm_quantization() -> Sequence[Declaration]:  # type: ignore[empty-body]
    """Quantization methods that the plugin offers. Called once, as `modulm_models` is."""


@hookspec
def modulm_platforms() -> Sequence[Declaration]:  # type: ignore[empty-body]
    """Platforms that the plugin offers. Called once, as `modulm_models` is."""


@hookspec
def modulm_parsers() -> Sequence[Declaration]:  # type: ignore[empty-body]
    """Tool and reasoning parsers that the plugin offers; each declaration states its `kind`.

    Called once, as `modulm_models` is.
    """


# Which one: asked when the user left the choice open; the first answer that is not None counts.


@hookspec(firstresult=True)
def modulm_choose_model(architectures: Sequence[str], config: Mapping[str, Any]) -> Choice | None:
    """Choose the driver that runs a checkpoint, e.g. an own variant for one fine-tune.

    `architectures` are the names in config.json, `config` is that whole file. First result. Asked
    once per engine, before the first architecture that is installed is taken.
    """


@hookspec(firstresult=True)
def modulm_choose_attention(spec: AttentionSpec, platform: Platform, ops: Ops) -> Choice | None:
    """Choose the attention backend for the layers of one spec.

    `spec` is the `AttentionSpec`, `platform` the platform in use, `ops` the table of operations
    that the model runs on. First result. Asked once per distinct spec, when `--attention-backend`
    is not given; the chosen backend must still accept the spec.
    """


@hookspec(firstresult=True)
def modulm_choose_quantization(checkpoint: CheckpointInfo, platform: Platform) -> Choice | None:
    """Choose the quantization method of a checkpoint.

    `checkpoint` is its `CheckpointInfo`, `platform` the platform in use. First result. Asked
    once per engine, when `--quantization` is not given, before the methods are asked whether
    they claim the checkpoint.
    """


@hookspec(firstresult=True)
def modulm_choose_platform(probes: Mapping[str, Probe]) -> Choice | None:
    """Choose the platform, given what each installed one says about this machine.

    `probes` maps names to `Probe`s. First result. Asked once per process, when `--device` is
    "auto", before the highest score is taken.
    """


@hookspec(firstresult=True)
def modulm_choose_parser(kind: str, checkpoint: CheckpointInfo) -> Choice | None:
    """Choose the parser for a model's output.

    `kind` is "tool_parsers" or "reasoning_parsers", `checkpoint` the model's `CheckpointInfo`.
    First result. Asked once per served model and kind, when the flag is not given; with no answer
    the parser is taken that fits best by what its package declares (`fits.toml`).
    """


@hookspec(firstresult=True)
def modulm_pooling(checkpoint: Any, config: Any) -> PoolingRecipe | None:
    """Read what a checkpoint's files say of pooling, in the format of one library or another.

    `checkpoint` is a `modulm.contracts.checkpoint.Checkpoint` (its folder in `path`, config.json in
    `config`), `config` the EngineConfig. First result. Called when an engine starts, unless
    `--runner generate` is set; read no weights here. Raising stops the start.
    """


# Configuration.


@hookspec
def modulm_config_proposals(config: Any) -> Sequence[Proposal] | None:
    """Propose values for flags that the user left open.

    `config` is the draft EngineConfig, in which an open flag is None. Called once per engine,
    before defaults are computed. Two plugins that propose different values for one flag are an
    error that names both.
    """


@hookspec(historic=True)
def modulm_config_final(config: Any) -> None:
    """The engine's configuration is complete; it does not change after this.

    `config` is the frozen EngineConfig. Historic: a plugin that is registered later is still
    told. Raising stops the engine from starting.
    """


# Model and engine.


@hookspec
def modulm_model_built(model: Any, config: Any) -> None:
    """The model's modules exist and hold no weights yet.

    `model` is a `modulm.contracts.model.Model`, `config` the EngineConfig. Called in the process
    that runs the model. Raising stops the load.
    """


@hookspec
def modulm_model_loaded(model: Any, config: Any) -> None:
    """The model's weights are in place and repacked; called before the first step.

    Arguments and process as in `modulm_model_built`. Raising stops the load.
    """


@hookspec(firstresult=True)
def modulm_drafter(config: Any, model: Any, platform: Any, loaded: Any) -> Drafter | None:
    """Make the `modulm.contracts.drafter.Drafter` that proposes tokens for the model to verify.

    `config` is the EngineConfig, `model` the loaded `modulm.contracts.model.Model`, `platform` the
    `Platform` that it is on, `loaded` the `modulm.loading.Loaded` that it is part of. First result.
    Asked in the process that runs the model, when its weights are in place, unless
    `--plugin-config` has a table for a speculator. Raising stops the start.
    """


@hookspec(firstresult=True)
def modulm_adapter_bank(config: Any, platform: Any, ops: Any) -> AdapterBank | None:
    """Make the `modulm.contracts.adapter.AdapterBank` that is put around the model's layers.

    `config` is the EngineConfig, `platform` the `Platform` that the model is built for, `ops` the
    table of operations that it runs on. First result. Asked in the process that runs the model,
    before its layers are built, unless `--plugin-config` has a table for a bank. Raising stops the
    start.
    """


@hookspec
def modulm_engine_started(config: Any) -> None:
    """The engine is ready for requests. `config`: EngineConfig. Notice, in the engine's process."""


@hookspec
def modulm_engine_stopping() -> None:
    """The engine is about to stop; requests that still run will be aborted. Notice."""


@hookspec
def modulm_engine_failed(error: BaseException) -> None:
    """The engine cannot go on because of `error`. Notice; nothing can be repaired here."""


# Requests and steps.


@hookspec
def modulm_request_admitted(request: str, params: SamplingParams | PoolingParams) -> None:
    """A request got its row and will run in this step.

    `request` is its id, `params` how its tokens are chosen. Called again when a preempted
    request comes back. Notice, in the engine's loop: be quick.
    """


@hookspec
def modulm_request_finished(request: str, reason: str) -> None:
    """The request with id `request` has ended.

    `reason` is "stop", "length", "abort" or "error". Notice.
    """


@hookspec
def modulm_logits_steps(config: Any, vocabulary: int) -> Sequence[LogitsProcessor]:  # type: ignore[empty-body]
    """Logits processors that every request of the engine passes through.

    `config` is the EngineConfig, `vocabulary` the width of the logits. Called once, when the
    sampler is built; the objects are then called directly by it, in the order of the answers.
    """


@hookspec
def modulm_step_finished(stats: Any) -> None:
    """One engine step is done. `stats`: `modulm.contracts.requests.StepStats`. Be quick."""


# Front ends.


@hookspec
def modulm_request_listeners(config: Any) -> Sequence[RequestListener]:  # type: ignore[empty-body]
    """Who is told of each request that has ended: its times, parameters, tokens and origin.

    `config` is the EngineConfig; a listener gets a `modulm.contracts.outputs.Finished`, whose
    `origin` is what `modulm_frontend.origin.request_origin` was where the request was made. Called
    once per front end, when it starts; listeners are then called directly, where outputs are handed
    out: be quick. One that raises is not called again. Raising stops the start.
    """


@hookspec
def modulm_app_created(app: Any, config: Any) -> None:
    """The HTTP application is built and not yet served: add routes, middleware, exception handlers.

    `app` is a FastAPI object, `config` the EngineConfig. Raising stops the server.
    """


@hookspec
def modulm_report_header(config: Any) -> Sequence[str]:  # type: ignore[empty-body]
    """Lines for the banner that `modulm serve` prints and for `modulm collect-env`.

    `config` is the EngineConfig, or None where there is none.
    """


@hookspec
def modulm_doctor_checks() -> Sequence[Check]:  # type: ignore[empty-body]
    """Checks for `modulm plugins doctor`: is what the plugin needs there, and does it work?"""
