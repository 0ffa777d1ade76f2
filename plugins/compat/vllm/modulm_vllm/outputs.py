"""vLLM's names for parts of an output."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import attrs
from attrs import define

from modulm.contracts import outputs as native
from modulm_expert_routes import chosen_experts

if TYPE_CHECKING:
    import numpy as np

__all__ = ["CompletionOutput", "with_vllm_names"]

T = TypeVar("T")


@define
class CompletionOutput(native.CompletionOutput):
    """One of the n outputs."""

    @property
    def routed_experts(self) -> np.ndarray | None:
        """Experts that the routers chose: [tokens, layers, top_k], of the prompt and all tokens but
        the last; of new tokens in a delta stream. None without enable_return_routed_experts.
        """
        return chosen_experts(self)


def with_vllm_names(output: T) -> T:
    """Give the texts of an output vLLM's additional attributes. Other outputs stay as they are."""
    if isinstance(output, native.RequestOutput):
        output.outputs = [_convert(choice) for choice in output.outputs]
    return output


def _convert(choice: native.CompletionOutput) -> CompletionOutput:
    return CompletionOutput(**{name: getattr(choice, name) for name in _FIELDS})


_FIELDS = tuple(field.name for field in attrs.fields(native.CompletionOutput))
