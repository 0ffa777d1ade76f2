"""How transformers' plans cut a model: styles of its layers over ranks, layers of each stage."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.contracts.quantization import Shard
from modulm.errors import UnsupportedError
from modulm.parallel import Mesh, ProcessGroup

__all__ = ["RankPlan", "cuts"]

#: Styles of layers that each rank computes whole.
_WHOLE = frozenset(
    {"", "mla_kv_a_proj", "replicate", "replicated_with_grad_allreduce", "embedding_rowwise"}
    | {"embedding_colwise", "local_params", "moe_identity_expert", "sequence_parallel"}
)
#: Styles that sum a module's outputs over ranks.
_SUMMED = frozenset({"all_reduce", "moe_tp_experts"})
#: Styles by a common name: the second names are older.
_ALIASES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "local_colwise": "colwise",
    "local_rowwise": "rowwise",
    "local_packed_rowwise": "packed_rowwise",
    "gather": "all_reduce",
}
_SPLIT = frozenset(
    {"colwise", "colwise_gather_output", "packed_colwise", "packed_rowwise"}
    | {"rowwise", "rowwise_split_input"}
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@frozen(eq=False)
class RankPlan:
    """This rank's part of a model.

    styles: the library's tensor parallel plan. layers: path of the list of layers. here: the layers
    of this stage; None if there is one stage.
    """

    name: str
    mesh: Mesh
    styles: Mapping[str, str]
    base: str
    layers: str
    here: range | None

    @classmethod
    def of(cls, model: Any, mesh: Mesh) -> RankPlan:
        """Read the library's plans. Raises UnsupportedError if it has none, or unknown ones."""
        name, base = type(model).__name__, str(model.base_model_prefix)
        styles = {
            path: _ALIASES.get(style, style) for path, style in (model._tp_plan or {}).items()
        }
        if mesh.tensor.size > 1:
            if not any(style in _SPLIT for path, style in styles.items() if "*" in path):
                raise UnsupportedError(
                    f"tensor_parallel_size: transformers has no plan for {name}; use "
                    "--pipeline-parallel-size if it has one for that, or one rank"
                )
            unknown = set(styles.values()) - _WHOLE - _SUMMED - _SPLIT
            if unknown:
                raise UnsupportedError(
                    f"tensor_parallel_size: {name}: not supported yet: styles "
                    f"{', '.join(sorted(unknown))} of transformers' plan"
                )
        return cls(name, mesh, styles, base, f"{base}.layers", _stage(model, base, mesh))

    @property
    def group(self) -> ProcessGroup:
        """The ranks that share each layer."""
        return self.mesh.tensor

    def style(self, path: str) -> str:
        """The style of a module or parameter; "" if each rank has it whole."""
        if self.group.size == 1:
            return ""
        style = self.styles.get(_NUMBER.sub("*", path), "")
        return "" if style in _WHOLE else style

    def divides(self, path: str) -> bool:
        """Whether a module's input is divided by the ranks, because their outputs are added."""
        style = self.styles.get(_NUMBER.sub("*", path), "")
        return self.group.size > 1 and style == "moe_identity_expert"

    def sums(self, path: str) -> bool:
        """Whether a module's outputs are partial sums."""
        return self.style(path) in _SUMMED

    def is_here(self, path: str, *, tied: bool = False) -> bool:
        """Whether this stage has the module or parameter. tied: its head reads the embedding."""
        stages = self.mesh.pipeline
        if self.here is None:
            return True
        if path.startswith(f"{self.layers}."):
            return int(path.removeprefix(f"{self.layers}.").partition(".")[0]) in self.here
        if not path.startswith(f"{self.base}."):
            return stages.last
        if path.startswith(f"{self.base}.embed_tokens"):
            return stages.first or (tied and stages.last)
        return True


def _stage(model: Any, base: str, mesh: Mesh) -> range | None:
    if mesh.pipeline.size == 1:
        return None
    plan = getattr(model, "_pp_plan", None) or {}
    layers = getattr(getattr(model, base, None), "layers", None)
    if f"{base}.layers" not in plan or layers is None:
        raise UnsupportedError(
            f"pipeline_parallel_size: transformers has no plan for {type(model).__name__}; use "
            "--tensor-parallel-size if it has one for that, or one rank"
        )
    return mesh.pipeline.stage(len(layers))


def cuts(style: str, shape: tuple[int, ...], group: ProcessGroup, what: str) -> _Cuts:
    """How a rank's part of a parameter lies in the whole: (dimension, shards), or None."""
    ndim = len(shape)
    if style in ("", *_SUMMED) or (style.endswith(("rowwise", "split_input")) and ndim == 1):
        return None
    if style in ("rowwise", "rowwise_split_input"):
        return ndim - 1, (group.shard(shape[-1], what),)
    if style == "packed_rowwise":
        return ndim - 1, _halves(shape[-1], group, what)
    dim = max(ndim - 2, 0)
    if style == "packed_colwise" and ndim > 1:
        return dim, _halves(shape[dim], group, what)
    return dim, (group.shard(shape[dim], what),)


def _halves(size: int, group: ProcessGroup, what: str) -> tuple[Shard, ...]:
    half = group.shard(size // 2, what)
    return (
        Shard(half.start, half.size, size),
        Shard(size // 2 + half.start, half.size, size),
    )


_Cuts = tuple[int, tuple[Shard, ...]] | None
