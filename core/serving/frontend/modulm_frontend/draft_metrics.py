"""Statistics of speculative decoding for one output."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from attrs import define, field

__all__ = ["DraftMetrics", "SpecDecodeFigures"]


class SpecDecodeFigures(TypedDict):
    """Speculative decoding statistics of one output, with vLLM's names; the last two by step."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: NotRequired[list[int]]
    per_step_drafted: NotRequired[list[int]]


@define
class DraftMetrics:
    """Draft acceptance of one output; see `modulm.contracts.outputs.SpecDecodeMetrics`."""

    num_spec_tokens: int
    steps: list[tuple[int, int]] = field(factory=list)

    def to_dict(self, detailed: bool = False) -> SpecDecodeFigures:
        """Return the statistics. detailed: include those of each step."""
        most = max(self.num_spec_tokens, *(drafted for drafted, _ in self.steps), 0)
        by_length: dict[str, list[int]] = {}
        histogram = [0] * (most + 1)
        for drafted, accepted in self.steps:
            by_length.setdefault(str(drafted), [0] * (drafted + 1))[accepted] += 1
            histogram[accepted] += 1
        count, drafted = len(self.steps), sum(drafted for drafted, _ in self.steps)
        accepted = sum(accepted for _, accepted in self.steps)
        figures: SpecDecodeFigures = {
            "mean_acceptance_length": 1 + accepted / count if count else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": by_length,
            "num_spec_steps": count,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": self.num_spec_tokens,
        }
        if detailed:
            figures["per_step_accepted"] = [accepted for _, accepted in self.steps]
            figures["per_step_drafted"] = [drafted for drafted, _ in self.steps]
        return figures
