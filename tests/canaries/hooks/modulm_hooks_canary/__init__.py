"""Hooks as docs/hooks.md of 0.1 has them: choices, proposals, notices, a route, a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from modulm.contracts.attention import AttentionSpec
from modulm.contracts.platform import Platform, Probe
from modulm.contracts.quantization import CheckpointInfo
from modulm.contracts.sampling import LogitsProcessor
from modulm.plugins import Check, Choice, Declaration, Proposal, hookimpl

TOLD: Counter[str] = Counter()
REASONS: list[str] = []


class Forbid(LogitsProcessor):
    """No request may take token 7."""

    api = 1

    def admit(self, view: Any) -> bool:
        return True

    def apply_row(self, view: Any, logits: Any) -> Any:
        logits[7] = -float("inf")
        return logits


@hookimpl
def modulm_models() -> Sequence[Declaration]:
    return [Declaration("CanaryTooForCausalLM", "modulm_canary:CanaryForCausalLM", api=1)]


@hookimpl
def modulm_choose_platform(probes: Mapping[str, Probe]) -> Choice | None:
    return Choice("cpu", "the canary lives on CPUs") if probes["cpu"].score else None


@hookimpl
def modulm_choose_attention(spec: AttentionSpec, platform: Platform) -> Choice | None:
    return Choice("sdpa", f"the canary likes sdpa on {platform.name}") if spec.causal else None


@hookimpl
def modulm_choose_parser(kind: str, checkpoint: CheckpointInfo) -> Choice | None:
    called = checkpoint.config.get("canary_parser")
    return Choice(called, "named in config.json") if called and kind == "tool_parsers" else None


@hookimpl
def modulm_config_proposals(config: Any) -> Sequence[Proposal]:
    return [Proposal("max_num_seqs", 3, "a small cage")]


@hookimpl
def modulm_config_final(config: Any) -> None:
    TOLD["final"] += 1


@hookimpl
def modulm_model_built(model: Any, config: Any) -> None:
    TOLD["parameters"] = sum(1 for _ in model.parameters())


@hookimpl
def modulm_model_loaded(model: Any) -> None:
    TOLD["loaded"] += 1


@hookimpl
def modulm_logits_steps(config: Any, vocabulary: int) -> Sequence[LogitsProcessor]:
    import torch

    return [Forbid(vocabulary, torch.device("cpu"))]


@hookimpl
def modulm_engine_started(config: Any) -> None:
    TOLD["seqs"] = config.scheduler.max_num_seqs


@hookimpl
def modulm_request_admitted(request: str, params: Any) -> None:
    TOLD["admitted"] += 1


@hookimpl
def modulm_request_finished(request: str, reason: str) -> None:
    REASONS.append(reason)


@hookimpl
def modulm_step_finished(stats: Any) -> None:
    TOLD["steps"] += 1
    TOLD["running"] = max(TOLD["running"], stats.running)


@hookimpl
def modulm_engine_stopping() -> None:
    TOLD["stopping"] += 1


@hookimpl
def modulm_app_created(app: Any, config: Any) -> None:
    @app.get("/canary")
    def sing() -> dict[str, str]:
        return {"song": "tweet"}


@hookimpl
def modulm_report_header(config: Any) -> Sequence[str]:
    return ["canary is installed"]


@hookimpl
def modulm_doctor_checks() -> Sequence[Check]:
    return [Check("canary", True, "sings")]
