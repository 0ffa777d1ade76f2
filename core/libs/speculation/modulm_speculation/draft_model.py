"""Draft models: loaded like any other model, with caches in the target's blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary, ref

import torch
from attrs import evolve, field, frozen

from modulm.contracts.attention import AttentionBackend, AttentionSpec
from modulm.contracts.kernels import RecordedForward
from modulm.contracts.model import CacheSpec
from modulm.errors import ConfigError, ModulmError, PluginNotFound, UnsupportedError
from modulm.loading import Loaded, load_model, open_checkpoint
from modulm.loading.checkpoint import open_loader
from modulm.loading.model import build_model
from modulm.parallel import Mesh
from modulm.plugins import manager
from modulm_speculation.speculator import Options

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.model import Batch, Model
    from modulm.contracts.platform import Platform, StepSizes
    from modulm_speculation.target import Target

__all__ = [
    "DraftModel", "DraftOptions", "DraftWeights", "ReplaceableDraft", "draft_of", "load_draft",
    "rebuild_draft", "set_draft", "stored",
]  # fmt: skip

#: By target, what drafts for it, for weight updates. A draft refers to its target.
_DRAFTS: WeakKeyDictionary[Loaded, ref[DraftModel | ReplaceableDraft]] = WeakKeyDictionary()

#: Prefix for names of a draft's layers, to distinguish them from the target's.
_PREFIX = "draft"


@frozen
class DraftWeights:
    """Location and format of a draft's weights; None: as for the target.

    ranks: how many the layers are split over, which must be as many as for the target. driver: a
    model class, or "module:Class", that replaces the architecture's. overrides: keys that replace
    those of config.json.
    """

    model: str
    quantization: str | None = None
    revision: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    enforce_eager: bool | None = None
    ranks: int | None = None
    driver: Any = None
    overrides: Mapping[str, Any] = field(factory=dict)


@frozen
class DraftOptions(Options):
    """Options of speculators with a draft model.

    model: folder, hub id or name of an installed checkpoint. quantization, dtype, kv_cache_dtype,
    revision, enforce_eager: like the flags of these names, for the draft.
    draft_tensor_parallel_size: as many as the target's. trees: draft the second choice for each
    token, too; attention needs masks. needs_model: the error message if no model is given.
    """

    model: str = ""
    quantization: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    revision: str | None = None
    enforce_eager: bool | None = None
    draft_tensor_parallel_size: int | None = None
    trees: bool = False
    needs_model: ClassVar[str] = "the path or hub id of a model is required"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not self.model:
            raise ConfigError("model", self.needs_model)

    def weights(self, **more: Any) -> DraftWeights:
        """Return the location of the weights. more: additional fields of `DraftWeights`."""
        return DraftWeights(
            model=self.model,
            quantization=self.quantization,
            revision=self.revision,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            enforce_eager=self.enforce_eager,
            ranks=self.draft_tensor_parallel_size,
            **more,
        )


class DraftModel:
    """A loaded draft model and its configuration.

    mesh: the ranks that share it, those of the target. sizes: those that its steps are padded to,
    since the device runs programs of fixed shapes; None: they are not. max_length: number of
    positions. targets: [draft vocabulary] int64, offsets from draft token ids to the target's, if
    the model has any (`d2t`). Raises UnsupportedError for models with recurrent states, which
    cannot be rolled back.
    """

    def __init__(
        self, config: EngineConfig, loaded: Loaded, mesh: Mesh | None = None,
        sizes: StepSizes | None = None,
    ) -> None:  # fmt: skip
        self.config, self.loaded, self.mesh = config, loaded, mesh or Mesh()
        self.model: Model = loaded.model
        self.sizes, self.padded = sizes, sizes is not None
        self.max_length = loaded.max_model_len
        self.targets: Tensor | None = getattr(loaded.model, "d2t", None)
        who = type(self.model).__name__
        if any(group.backend is None for group in loaded.groups):
            raise UnsupportedError(f"{who} has recurrent states, which draft models do not support")
        specs = [c.spec for c in self.model.caches if isinstance(c.spec, AttentionSpec)]
        #: Index of a cache that stores all tokens of a row, if there is one.
        self.lead = next((at for at, spec in enumerate(specs) if spec.window is None), 0)
        self.caches = tuple(_renamed(spec) for spec in self.model.caches)
        self.backends: dict[AttentionSpec, AttentionBackend] = {}
        for group in loaded.groups:
            used = [group.backend, *(backend for backend, _ in group.followers)]
            own = [group.spec, *(backend.spec for backend, _ in group.followers)]
            for spec, backend in zip(own, used, strict=True):
                if isinstance(spec, AttentionSpec) and backend is not None:
                    self.backends[spec] = backend
        self.record()

    def record(self) -> None:
        """Record steps anew: recorded ones refer to the addresses of weights."""
        forward = self.model.forward
        eager = self.config.model.enforce_eager
        self._forward = forward if eager else self.loaded.ops.recorded(forward)

    def run(self, batch: Batch) -> Tensor:
        """Compute hidden states [tokens, hidden]; they are valid until the next call."""
        output = self._forward(batch)
        return output if isinstance(output, torch.Tensor) else output[0]

    @property
    def steps(self) -> Sequence[np.ndarray]:
        """The steps to run at start, so that their programs are compiled: tokens of each row."""
        forward = self._forward
        return forward.steps if self.padded and isinstance(forward, RecordedForward) else ()

    def samples(self, most: int) -> Iterator[int]:
        """Yield the numbers of tokens that steps are padded to when up to `most` are chosen."""
        for size in self.sizes.samples if self.sizes else ():
            yield size
            if size >= most:
                return

    def choose(self, hidden: Tensor) -> Tensor:
        """Return the most probable tokens: hidden [n, hidden] -> [n] int64."""
        chosen: Tensor = self.loaded.ops.argmax(self.model.logits(hidden))
        return chosen if self.targets is None else chosen + self.targets[chosen]

    def choose_two(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `choose` does, and the next most probable tokens: [n] int64 each."""
        logits = self.model.logits(hidden)
        chosen = self.loaded.ops.argmax(logits)
        others = logits.scatter(-1, chosen.clamp(min=0)[:, None], float("-inf"))
        second = self.loaded.ops.argmax(others)
        if self.targets is None:
            return chosen, second
        return chosen + self.targets[chosen], second + self.targets[second]


class ReplaceableDraft(ABC):
    """Weights of a drafter that are no model, which an update can replace."""

    @abstractmethod
    def replace(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Check tensors by the names in the drafter's files; return a function that puts them in
        place. Raises ValueError, KeyError.
        """


def set_draft(target: Target, draft: DraftModel | ReplaceableDraft) -> None:
    """Let weight updates of `target` reach the weights of its drafter."""
    _DRAFTS[target.loaded] = ref(draft)


def draft_of(loaded: Loaded) -> DraftModel | ReplaceableDraft | None:
    """Return the weights of a loaded model's drafter, if it has any."""
    kept = _DRAFTS.get(loaded)
    return None if kept is None else kept()


def rebuild_draft(draft: DraftModel, platform: Platform) -> tuple[Checkpoint, Any]:
    """Return a draft's checkpoint, and its model without weights, as `build_model` does."""
    plugins = manager.current()
    checkpoint = open_checkpoint(draft.config, plugins)
    try:
        return checkpoint, build_model(draft.config, checkpoint, platform, plugins, draft.mesh)
    finally:
        _forget_classes(draft.config)


def load_draft(target: Target, weights: DraftWeights) -> DraftModel:
    """Load a draft on the target's platform. Raises ConfigError naming a mismatch."""
    plugins, ranks = manager.current(), target.mesh.tensor.size
    if weights.ranks not in (None, ranks):
        message = f"draft_tensor_parallel_size: leave it out: drafters are on all {ranks} ranks"
        raise ConfigError("speculative_config", message)
    try:
        config = _config(target, weights)
        checkpoint = open_checkpoint(config, plugins)
        longest = checkpoint.config.get("max_position_embeddings")
        if weights.max_model_len is None and isinstance(longest, int):
            length = min(longest, target.loaded.max_model_len)
            config = config.with_parts({"max_model_len": length})
        try:
            loaded = load_model(config, checkpoint, target.platform, plugins, target.mesh)
        finally:
            _forget_classes(config)
        flags = target.config.scheduler
        most = flags.max_num_seqs or 1, flags.max_num_batched_tokens or 1
        draft = DraftModel(config, loaded, target.mesh, target.platform.step_sizes(*most))
        set_draft(target, draft)
        return draft
    except ModulmError as error:
        message = f"model {weights.model}: {error}"
        raise ConfigError("speculative_config", message) from error


def _forget_classes(config: EngineConfig) -> None:
    """Unregister the class of a draft, which other processes cannot import."""
    for name in config.model.model_class_overrides:
        with suppress(PluginNotFound):
            manager.current().unregister("models", name)


def stored(target: Target, weights: DraftWeights) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Return a draft's config.json and the names of its stored tensors."""
    plugins = manager.current()
    try:
        config = _config(target, evolve(weights, driver=None, overrides={}))
        checkpoint = open_checkpoint(config, plugins)
        index = open_loader(config, checkpoint.path, plugins).driver.index()
        return checkpoint.config, frozenset(index)
    except ModulmError as error:
        message = f"model {weights.model}: {error}"
        raise ConfigError("speculative_config", message) from error


def _config(target: Target, weights: DraftWeights) -> EngineConfig:
    """Return the target's configuration with the draft as its model."""
    config, of = target.config, weights
    overrides = dict(of.overrides)
    classes: dict[str, Any] = {}
    if of.driver is not None:
        name = of.driver if isinstance(of.driver, str) else of.driver.__name__
        name = f"{_PREFIX} {name}"
        overrides["architectures"], classes[name] = [name], of.driver
    parts: dict[str, Any] = {
        "model": of.model,
        "revision": of.revision,
        "quantization": of.quantization,
        "quantization_config": None,
        "dtype": of.dtype or target.loaded.dtype,
        "max_model_len": of.max_model_len,
        "hf_overrides": overrides,
        "hf_config_path": None,
        "model_impl": "auto",
        "model_class_overrides": classes,
        "runner": "generate",
        # The weights of a draft stay on the device.
        "cpu_offload_gb": 0.0,
        "cpu_offload_params": (),
        "cpu_offload_experts": 0,
        "offload_backend": "auto",
        "offload_group_size": 0,
        "offload_params": (),
        "plugin_config": {k: v for k, v in config.device.plugin_config.items() if k != "adapters"},
    }
    optional = {"enforce_eager": of.enforce_eager, "kv_cache_dtype": of.kv_cache_dtype}
    parts |= {name: value for name, value in optional.items() if value is not None}
    return config.with_parts(parts)


def _renamed(spec: CacheSpec) -> CacheSpec:
    shares = None if spec.shares is None else f"{_PREFIX}.{spec.shares}"
    return evolve(spec, layer=f"{_PREFIX}.{spec.layer}", shares=shares, follows=None)
