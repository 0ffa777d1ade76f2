"""A checkpoint's multi-token-prediction layer, as a model that runs beside the main one.

The main model describes the layer and its inputs (`Model.mtp`) and lends its embedding and LM head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import evolve
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch, CacheSpec, Model, MtpLayer
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Rewrite, WeightNames, read_config
from modulm_speculation.chain import HIDDEN

if TYPE_CHECKING:
    from modulm_speculation import Target

__all__ = ["Predictor", "predictor_of"]

#: Copies of the model's embedding and LM head in the layer's weights are ignored.
_SHARED = r"\.(embed_tokens|shared_head\.head)\."


class Predictor(Module, Model):
    """The layer of a model of class `family`. `target` must be set before it runs."""

    api = 1
    family: ClassVar[type[Model]]
    target: Target | None = None

    def __init__(self, config: Any, build: Builder) -> None:
        super().__init__()
        self.config, self.ops = config, build.ops
        self.of = of = _layer(self.family, config)
        width = of.hidden

        def norm(name: str) -> Module:
            return build.rms_norm(name, width, of.eps, offset=of.offset)

        self.embedding_norm, self.hidden_norm = norm(of.embedding_norm), norm(of.hidden_norm)
        first, second = _parts(of)
        first_half = build.linear(first, width, width, split=False)
        second_half = build.linear(second, width, width, split=False)
        halves = (second_half, first_half) if of.state_first else (first_half, second_half)
        self.from_embedding, self.from_hidden = halves
        self.layer = of.layer(build.at(of.at))
        self.norm = norm(of.norm) if of.norm else None
        self._caches = tuple(build.shared.caches)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        of, names = _layer(cls.family, config), cls.family.weights(config)
        own = (of.at, of.embedding_norm, of.hidden_norm, of.project, *filter(None, [of.norm]))
        kept = "|".join(re.escape(name) for name in own)
        halve = Rewrite(rf"^{re.escape(of.project)}\.", lambda n, t: _halves(of, n, t))
        return evolve(names, ignore=(rf"^(?!({kept})\.)", _SHARED), rewrite=(halve, *names.rewrite))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return cls.family.tiny()

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return self._caches

    def forward(self, batch: Batch) -> Tensor:
        """Compute the states that the next draft continues from: [tokens, hidden]."""
        embedded = self.embedding_norm(self._target.embeddings(batch.tokens))
        state = self.hidden_norm(batch.extras[HIDDEN])
        x = self.ops.add(self.from_embedding(embedded), self.from_hidden(state))
        x, residual = self.layer(x, None, batch)
        if residual is not None:
            x = self.ops.add(x, residual)
        return self.norm(x) if self.norm is not None and self.of.normed else x

    def logits(self, hidden: Tensor) -> Tensor:
        if self.norm is not None and not self.of.normed:
            hidden = self.norm(hidden)
        return self._target.logits(hidden)

    @property
    def _target(self) -> Target:
        if self.target is None:
            raise UnsupportedError("an MTP layer requires its target model")
        return self.target


def predictor_of(family: type[Model], architectures: Sequence[str]) -> type[Predictor]:
    """Return the predictor class for models of class `family`.

    architectures: those of the target's config.json, which models of media are read by.
    """
    config_type = family.config_type
    if hasattr(config_type, "from_table"):
        config_type = _read_as(config_type, tuple(architectures))
    more = {"family": family, "config_type": config_type}
    return type(f"{family.__name__}Mtp", (Predictor,), more)


def _read_as(config_type: type, architectures: Sequence[str]) -> type:
    """Return a class that reads config.json under the target's architectures."""

    def from_table(table: Mapping[str, Any], file: str) -> Any:
        return read_config({**table, "architectures": list(architectures)}, config_type, file)

    return type(config_type.__name__, (), {"from_table": staticmethod(from_table)})


def _layer(family: type[Model], config: Any) -> MtpLayer:
    layer = family.mtp(config)
    if layer is None:
        raise UnsupportedError(f"{family.__name__} has no MTP layer")
    return layer


def _parts(of: MtpLayer) -> tuple[str, str]:
    """Names of the two halves of the input projection."""
    return f"{of.project}_first", f"{of.project}_second"


def _halves(of: MtpLayer, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split a weight [outputs, 2 inputs] into the parts for the two inputs."""
    if name != f"{of.project}.weight":
        raise UnsupportedError(f"{name}: this projection with this quantization: not supported yet")
    width = tensor.shape[-1] // 2
    for part, half in zip(_parts(of), (tensor[:, :width], tensor[:, width:]), strict=True):
        yield f"{part}.weight", half
