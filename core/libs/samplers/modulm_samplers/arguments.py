"""The samplers and their settings. Front ends put settings into `SamplingParams.extra_args`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

__all__ = ["SAMPLERS", "Sampler", "sampler_arguments", "unserved"]


@frozen
class Sampler:
    """A sampler: the setting that turns it on, the values of that setting that leave it off, its
    other settings, and the distribution that implements it.
    """

    switch: str
    off: tuple[float, ...]
    others: tuple[str, ...]
    distribution: str

    @property
    def settings(self) -> tuple[str, ...]:
        """The names of all settings."""
        return (self.switch, *self.others)


_DRY = ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers")
SAMPLERS = (
    Sampler("dry_multiplier", (0,), _DRY, "modulm-logits-dry"),
    Sampler("dynatemp_range", (0,), ("dynatemp_exponent",), "modulm-logits-dynamic-temperature"),
    Sampler("mirostat", (0,), ("mirostat_tau", "mirostat_eta"), "modulm-logits-mirostat"),
    Sampler("top_n_sigma", (-1, 0), (), "modulm-logits-top-n-sigma"),
    Sampler("typical_p", (1,), (), "modulm-logits-typical-p"),
    Sampler("xtc_probability", (0,), ("xtc_threshold",), "modulm-logits-xtc"),
)


def sampler_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the samplers that are on. values: by name; None where not set."""
    arguments: dict[str, Any] = {}
    for sampler in SAMPLERS:
        if values.get(sampler.switch) in (None, *sampler.off):
            continue
        given = {name: values.get(name) for name in sampler.settings}
        arguments |= {name: value for name, value in given.items() if value is not None}
    return arguments


def unserved(arguments: Mapping[str, Any], served: Iterable[str]) -> Sampler | None:
    """Return a sampler that is on although no installed processor has its settings, else None."""
    known = frozenset(served)
    for sampler in SAMPLERS:
        is_on = arguments.get(sampler.switch) not in (None, *sampler.off)
        if is_on and sampler.switch not in known:
            return sampler
    return None
