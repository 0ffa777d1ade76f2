"""Speculative decoding statistics of a run, under the names in vLLM's result files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import httpx
from attrs import field, frozen

if TYPE_CHECKING:
    from modulm.contracts.outputs import RequestOutput

__all__ = ["Drafts", "of_outputs", "of_server"]

_SAMPLE = re.compile(
    r"^(?:modulm|vllm):spec_decode_num_(drafts|draft_tokens|accepted_tokens(?:_per_pos)?)_total"
    r"(?:\{(.*)\})? (\S+)$",
    re.MULTILINE,
)
_POSITION = re.compile(r'position="(\d+)"')


@frozen
class Drafts:
    """Draft statistics.

    drafts: number of verified drafts. tokens, accepted: drafted and accepted tokens. at: accepted
    tokens by position in the draft.
    """

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0
    at: tuple[int, ...] = field(default=())

    def since(self, before: Drafts) -> Drafts:
        """The difference to earlier counts."""
        known = (*before.at, *[0] * (len(self.at) - len(before.at)))
        return Drafts(
            self.drafts - before.drafts,
            self.tokens - before.tokens,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.at, known, strict=True)),
        )

    def figures(self) -> dict[str, Any]:
        """The statistics for result files; empty without drafts. Rates are in percent."""
        if not self.drafts:
            return {}
        return {
            "spec_decode_acceptance_rate": 100 * self.accepted / self.tokens,
            "spec_decode_acceptance_length": 1 + self.accepted / self.drafts,
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_draft_tokens": self.tokens,
            "spec_decode_accepted_tokens": self.accepted,
            "spec_decode_per_position_acceptance_rates": [n / self.drafts for n in self.at],
        }


def of_server(base: str, headers: dict[str, str]) -> Drafts | None:
    """Return a server's counts so far; None if it has none."""
    try:
        answer = httpx.get(f"{base}/metrics", headers=headers, timeout=5)
    except httpx.HTTPError:
        return None
    return _read(answer.text) if answer.is_success else None


def _read(text: str) -> Drafts | None:
    sums: dict[str, int] = {}
    counts_by_position: dict[int, int] = {}
    for name, labels, value in _SAMPLE.findall(text):
        count = round(float(value))
        match = _POSITION.search(labels)
        if match is None:
            sums[name] = sums.get(name, 0) + count
        else:
            counts_by_position[int(match[1])] = counts_by_position.get(int(match[1]), 0) + count
    if "drafts" not in sums:
        return None
    at = tuple(
        counts_by_position.get(match, 0) for match in range(max(counts_by_position, default=-1) + 1)
    )
    return Drafts(sums["drafts"], sums.get("draft_tokens", 0), sums.get("accepted_tokens", 0), at)


def of_outputs(outputs: Iterable[RequestOutput]) -> Drafts:
    """Sum the counts in the outputs of an engine in this process."""
    metrics_list = [choice.spec_decode_metrics for output in outputs for choice in output.outputs]
    steps = [step for metrics in metrics_list if metrics is not None for step in metrics.steps]
    longest = max((right for _, right in steps), default=0)
    return Drafts(
        len(steps),
        sum(drafted for drafted, _ in steps),
        sum(right for _, right in steps),
        tuple(sum(right > position for _, right in steps) for position in range(longest)),
    )
