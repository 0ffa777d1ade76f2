"""CodeGen (Nijkamp et al., arXiv 2203.13474): GPT-J's block with fused projections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen
from torch import Tensor

from modulm.nn import Rewrite, WeightNames
from modulm_gptj.gptj import GPTJConfig, GPTJForCausalLM, tiny_gptj

__all__ = ["CodeGenConfig", "CodeGenForCausalLM"]

#: The projections were split over this many accelerators in training.
_SHARES = 4


@frozen(kw_only=True)
class CodeGenConfig(GPTJConfig):
    """config.json of CodeGen."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.heads % _SHARES:
            raise ValueError(f"n_head: {self.heads} heads are not stored in {_SHARES} shares")


def _split(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split a fused projection, whose shards contain queries, values and keys in this order."""
    parts = tensor.unflatten(0, (_SHARES, 3, -1))
    for index, part in enumerate(("q_proj", "v_proj", "k_proj")):
        yield name.replace("qkv_proj", part), parts[:, index].flatten(0, 1)


class CodeGenForCausalLM(GPTJForCausalLM):
    """CodeGen with a language-model head."""

    config_type = CodeGenConfig
    names = WeightNames(
        rename=GPTJForCausalLM.names.rename,
        ignore=GPTJForCausalLM.names.ignore,
        rewrite=(Rewrite(r"qkv_proj", _split),),
    )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_gptj("codegen", "CodeGenForCausalLM")
