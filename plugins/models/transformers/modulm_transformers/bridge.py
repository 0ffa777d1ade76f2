"""Runs any decoder of the transformers library with paged memory, batching and sampling.

transformers allows the attention function to be replaced. Ours receives the queries, keys and
values of a step with concatenated rows, writes the cache and attends over each row's blocks, so the
model's code needs no changes for batches or chunked prefill. The attention layers and their
settings are discovered by running a few tokens once. Linear layers are replaced by modulm's, so
that they are packed or quantized like those of native models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from modulm.contracts.attention import AttentionBackend, AttentionInputs, AttentionSpec
from modulm.contracts.model import Batch, CacheSpec, Model
from modulm.errors import UnsupportedError
from modulm.nn import Builder, WeightNames
from modulm_layers import tiny_config
from modulm_transformers.config import RemoteConfig, TransformersConfig
from modulm_transformers.encoder import TransformersForPooling
from modulm_transformers.kept_scales import KeptScales
from modulm_transformers.load import explained, replace_linears, whole_model

__all__ = ["NAME", "RemoteForCausalLM", "TransformersForCausalLM"]

#: The name under which our attention function is registered in transformers.
NAME = "modulm"
_PROBE = 3
#: Tensor arguments of attention that are known from the step and can be ignored.
_HARMLESS = frozenset({"cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "position_ids"})


class TransformersForCausalLM(Module, Model):
    """A causal language model of transformers, whatever its architecture."""

    api = 1
    config_type = TransformersConfig

    #: Attention implementation of the library where ours is not used.
    around: ClassVar[str | None] = NAME

    def __new__(cls, config: TransformersConfig, build: Builder) -> Any:
        """Select the class: pooling models and models with images have other ones."""
        from modulm_transformers.image_model import seeing

        if not config.generates:
            return TransformersForPooling(config, build)
        return super().__new__(seeing(config) if config.sees else cls)

    def __init__(self, config: TransformersConfig, build: Builder) -> None:
        super().__init__()
        if build.ranks > 1:
            raise UnsupportedError(
                "tensor parallelism: not supported yet for models run by transformers"
            )
        self.config = config
        self.build = build
        self.layers: dict[int, tuple[int, AttentionBackend]] = {}
        self.scales = KeptScales(build.shared.calculate_kv_scales)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        return WeightNames()

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return tuple(self.build.shared.caches)

    def load(self, checkpoint: Path) -> bool:
        shared = self.build.shared
        _register()
        self.whole = whole_model(self.config, checkpoint, shared, attention=self.around)
        prefix = self.whole.base_model_prefix
        self._take_decoder(prefix)
        replace_linears(self.whole, self.build)
        self._learn_layers()
        if any(backend.spec.scales for _, backend in self.layers.values()):
            modules = {path: id(m) for path, m in self.base.named_modules()}
            self.scales.take(checkpoint, prefix, modules, shared.device)
        setattr(self.whole, prefix, _HiddenStates())
        return True

    def _take_decoder(self, prefix: str) -> None:
        """Set `base`, which runs in each step: the model without its head."""
        self.base = getattr(self.whole, prefix)

    @torch.inference_mode()
    def _learn_layers(self) -> None:
        """Run a few tokens and record the settings of each attention layer."""
        trace = _Trace(self.build)
        tokens = torch.arange(_PROBE, device=self.build.shared.device)
        name = self.config.model.__name__
        with explained(f"{name}: transformers' code for it does not run on our memory"):
            inputs = {"input_ids": tokens[None] % self.config.vocab_size}
            self._run(inputs, tokens[None], trace)
        if not trace.layers:
            raise UnsupportedError(f"{name} does not pass our arguments to its attention")
        self.layers = trace.layers

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states after the final norm: [tokens, hidden]."""
        step = _Step(batch, self.layers, self.scales)
        return self._run(self._inputs(batch), self._positions(batch), step)

    def _inputs(self, batch: Batch) -> Mapping[str, Any]:
        """The decoder's arguments for a step's tokens."""
        if batch.embeds is None or batch.embeds_mask is None:
            return {"input_ids": batch.tokens[None]}
        embedded = self.base.get_input_embeddings()(batch.tokens)
        replaced = batch.embeds[:, : embedded.shape[1]].to(embedded.dtype)
        return {"inputs_embeds": torch.where(batch.embeds_mask[:, None], replaced, embedded)[None]}

    def _positions(self, batch: Batch) -> Tensor:
        """Position ids in the decoder's form: [1, tokens]."""
        return batch.positions[None]

    def _run(self, inputs: Mapping[str, Any], positions: Tensor, step: Any) -> Tensor:
        output = self.base(**inputs, position_ids=positions, use_cache=False, modulm=step)
        hidden: Tensor = output[0][0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the model's own head, with its scaling and softcap."""
        logits: Tensor = self.whole(inputs_embeds=hidden[None], use_cache=False).logits[0]
        # Tokens of media may have embeddings alone.
        missing = self.config.vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("smollm3", "SmolLM3ForCausalLM", no_rope_layers=[1, 1, 0])


class RemoteForCausalLM(TransformersForCausalLM):
    """A causal language model with code in the checkpoint, written for transformers."""

    config_type = RemoteConfig
    remote_code = True


class _HiddenStates(Module):
    """Stands in for the decoder when only the head runs: returns its input."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(inputs_embeds)


class _Output:
    """A decoder output that has only hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _Trace:
    """Registers a cache for each attention layer, in the order in which they run."""

    def __init__(self, build: Builder) -> None:
        self.build = build
        self.layers: dict[int, tuple[int, AttentionBackend]] = {}

    def attend(
        self, module: Module, q: Tensor, k: Tensor, v: Tensor, request: _AttentionRequest
    ) -> Tensor:
        """Attend without a cache: q, k, v: [1, heads, tokens, size] -> [1, tokens, heads, value
        size].
        """
        if id(module) in self.layers:
            raise UnsupportedError("not supported yet: a layer that attends twice in a step")
        spec = AttentionSpec(
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[-1],
            value_dim=v.shape[-1] if v.shape[-1] != q.shape[-1] else None,
            scale=request.scale,
            dtype=self.build.dtype,
            kv_dtype=self.build.shared.kv_dtype,
            window=request.window,
            softcap=request.softcap,
            sinks=request.sinks is not None,
            scales=self.build.shared.kv_dtype.startswith("float8"),
        )
        at = self.build.at(f"layers.{len(self.layers)}")
        self.layers[id(module)] = at.attention_cache(spec)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=request.scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)


class _Step:
    """One step of the engine, as the attention function sees it."""

    def __init__(
        self,
        batch: Batch,
        layers: Mapping[int, tuple[int, AttentionBackend]],
        scales: KeptScales,
    ) -> None:
        self.batch, self.layers, self.scales = batch, layers, scales

    def attend(
        self, module: Module, q: Tensor, k: Tensor, v: Tensor, request: _AttentionRequest
    ) -> Tensor:
        """Shapes as in `_Trace.attend`; attends over each row's own cache."""
        cache, backend = self.layers[id(module)]
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
        batch = self.batch
        pair = self.scales.of(id(module), k, v) if backend.spec.scales else (None, None)
        inputs = AttentionInputs(sinks=request.sinks, k_scale=pair[0], v_scale=pair[1])
        backend.forward(q, k, v, batch.caches[cache], batch.plan(cache), out, inputs)
        return out[None]


class _AttentionRequest:
    """Attention settings that a model passes besides queries, keys and values."""

    def __init__(
        self, scale: float, window: int | None, softcap: float, sinks: Tensor | None
    ) -> None:
        self.scale, self.window, self.softcap, self.sinks = scale, window, softcap, sinks


def _attend(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    modulm: Any = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Our attention function, with the arguments of transformers' models.

    Raises UnsupportedError for arguments that would change the result and are not supported.
    """
    if modulm is None:
        raise UnsupportedError(f"{type(module).__name__} drops the arguments meant for attention")
    if attention_mask is not None:
        raise UnsupportedError(f"{type(module).__name__} builds its own mask")
    for name, argument in more.items():
        if isinstance(argument, Tensor) and name not in _HARMLESS:
            raise UnsupportedError(
                f"{type(module).__name__}: not supported yet: attention argument {name}"
            )
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedError(f"{type(module).__name__} uses bidirectional attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sinks = None if s_aux is None else s_aux.float()
    request = _AttentionRequest(scale, sliding_window or None, softcap or 0.0, sinks)
    return modulm.attend(module, query, key, value, request), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Return no mask: the backend masks by rows and positions."""
    return


def _register() -> None:
    """Register our attention in transformers; may be called again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)
