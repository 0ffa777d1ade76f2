"""Runs any decoder of the transformers library with paged memory, batching and sampling.

transformers allows the attention function to be replaced. Ours receives the queries, keys and
values of a step with concatenated rows, writes the cache and attends over each row's blocks, so the
model's code needs no changes for batches or chunked prefill. The attention layers and their
settings are discovered by running a few tokens once. Linear layers are replaced by modulm's, so
that they are packed or quantized like those of native models.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch, CacheSpec, Model
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Embedding, WeightNames
from modulm_layers import tiny_config
from modulm_transformers.attention import (
    NAME,
    AttentionStep,
    AttentionTrace,
    Layers,
    register_attention,
)
from modulm_transformers.bare import bare_model, declare_weights, dummy_weights
from modulm_transformers.bridged_decoder import BridgedDecoder
from modulm_transformers.config import TransformersConfig
from modulm_transformers.conversions import Conversions, ConvertedNames
from modulm_transformers.kept_scales import KeptScales
from modulm_transformers.load import explained, replace_linears, whole_model
from modulm_transformers.plans import RankPlan
from modulm_transformers.recognized_decoder import decoder_parts
from modulm_transformers.rows import RowRunner
from modulm_transformers.slots import add_slots

log = logging.getLogger("modulm.models")

__all__ = ["NAME", "BridgedForCausalLM", "logits_of"]

_PROBE = 3
_CLOSE = 1e-2


class BridgedForCausalLM(Module, Model):
    """A causal language model of transformers, whatever its architecture; see `choice`."""

    api = 1
    config_type = TransformersConfig

    #: Attention implementation of the library where ours is not used.
    around: ClassVar[str | None] = NAME
    #: Whether weights may be loaded by modulm.
    slotted: ClassVar[bool] = True

    def __init__(self, config: TransformersConfig, build: Builder) -> None:
        super().__init__()
        self.config = config
        self.build = build
        self.layers: Layers = {}
        self.scales = KeptScales(build.shared.calculate_kv_scales)
        self.rows: RowRunner | None = None
        self.joined = False
        self.first_position = 0
        self.whole: Any = None
        self.base: Any = None
        #: Runs the decoder without the library's code, if all of it was recognized.
        self.decoder: BridgedDecoder | None = None
        register_attention()
        #: Why the library loads the weights; "" if modulm does.
        self.library_loads = self._place()
        if self.library_loads:
            declare_weights(self.config, self.build.shared)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        found: Conversions = config.conversions
        return ConvertedNames(ignore=found.ignored, conversions=found)

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return tuple(self.build.shared.caches)

    def _place(self) -> str:
        """Build the model with weight slots; return why that is not possible, or "".

        Raises UnsupportedError if several ranks need it.
        """
        shared, mesh = self.build.shared, self.build.shared.mesh
        reason = self.config.rows or ("" if self.slotted else "models with images")
        if not reason:
            lists = (shared.units, shared.elsewhere, shared.caches)
            before = [len(each) for each in lists]
            try:
                if shared.adapters is not None:  # the bank keeps what it is told
                    trial = evolve(shared, adapters=None, units=[], elsewhere=[], caches=[])
                    self._build_placed(evolve(self.build, shared=trial))
                self._build_placed(self.build)
            except UnsupportedError as error:
                reason, self.decoder = str(error), None
                for each, count in zip(lists, before, strict=True):
                    del each[count:]
        if reason and mesh.tensor.size * mesh.pipeline.size * mesh.expert.size > 1:
            raise UnsupportedError(f"{self.config.model.__name__}: several ranks: {reason}")
        return reason

    def _build_placed(self, build: Builder) -> None:
        self.whole = bare_model(self.config, build.shared.dtype, self.around)
        plan = RankPlan.of(self.whole, build.shared.mesh)
        self.config.conversions.learn(self.whole)
        self._take_decoder(self.whole.base_model_prefix)
        if self.base is self.whole:
            raise UnsupportedError("its decoder is not apart from its head")
        tables = add_slots(self.whole, build, plan, self.config.conversions)
        with dummy_weights(self.whole):
            self._learn_layers(build, torch.device("cpu"))
        self.decoder = self._recognized(build, tables)

    def _recognized(self, build: Builder, tables: Mapping[int, Embedding]) -> BridgedDecoder | None:
        """What runs the decoder without the library's code; None where that does more than ours."""
        if build.shared.mesh.pipeline.size > 1 or self.first_position:
            return None
        parts = decoder_parts(self.base)
        if parts is None:
            return None
        if any(len(self.layers.get(id(layer.attn), ())) != 1 for layer in parts.layers):
            return None
        embedding = tables[id(parts.embedding)]
        return BridgedDecoder(build, parts, embedding, self.layers, self.scales)

    def load(self, checkpoint: Path) -> bool:
        if self.library_loads:
            return self._load_by_library(checkpoint)
        device = self.build.shared.device
        for module in self.whole.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        self._finish(checkpoint)
        return False

    def _load_by_library(self, checkpoint: Path) -> bool:
        self.config.conversions.forget()
        del self.build.shared.units[:]  # see `declare_weights`
        reason = self.config.rows
        if not reason:
            shared = self.build.shared
            self.whole = whole_model(self.config, checkpoint, shared, attention=self.around)
            self._take_decoder(self.whole.base_model_prefix)
            replace_linears(self.whole, self.build)
            try:
                if self.base is self.whole:
                    raise UnsupportedError(self.library_loads)
                self._learn_layers(self.build, shared.device)
            except UnsupportedError as error:
                if not self.slotted:
                    raise
                reason = str(error)
                del shared.caches[:]
        if reason:
            self._load_rows(checkpoint, reason)
        else:
            self._finish(checkpoint)
        return True

    def _load_rows(self, checkpoint: Path, reason: str) -> None:
        """Load a model that runs row by row. reason: why it has to."""
        shared, name = self.build.shared, self.config.model.__name__
        if shared.kv_dtype != str(shared.dtype).removeprefix("torch."):
            raise UnsupportedError(
                f"kv_cache_dtype: {name} runs with transformers' own caches, in their types; "
                f"leave the flag out ({reason})"
            )
        log.warning("slow: %s runs row by row with transformers' caches: %s", name, reason)
        self.whole = self.base = None
        self.whole = whole_model(self.config, checkpoint, shared)
        self._take_decoder(self.whole.base_model_prefix)
        replace_linears(self.whole, self.build)
        self.rows = self._row_runner()
        self.rows.learn()

    def _row_runner(self) -> RowRunner:
        """The runner of the decoder, or of the whole model if its head reads more than that."""
        size, prefix = self.config.vocab_size, self.whole.base_model_prefix
        if self._is_headed(prefix):
            setattr(self.whole, prefix, _HiddenStates())
            return RowRunner(self.base, self.build, _hidden_states, size)
        self.joined = True
        return RowRunner(self.whole, self.build, logits_of, size)

    @torch.inference_mode()
    def _is_headed(self, prefix: str) -> bool:
        """Whether the head computes the model's logits from the decoder's hidden states."""
        if self.base is self.whole:
            return False
        tokens = torch.arange(1, 1 + _PROBE, device=self.build.shared.device)[None]
        accepted = signature(self.base.forward).parameters
        plain = {"use_cache": False} if "use_cache" in accepted else {}
        with explained(f"{self.config.model.__name__}: transformers' code for it does not run"):
            expected = self.whole(input_ids=tokens, **plain).logits[0]
        try:
            hidden = _hidden_states(self.base(input_ids=tokens, **plain))
            setattr(self.whole, prefix, _HiddenStates())
            found: Tensor = self.whole(inputs_embeds=hidden[None]).logits[0]
        except Exception:
            return False
        finally:
            setattr(self.whole, prefix, self.base)
        return found.shape == expected.shape and torch.allclose(
            found.float(), expected.float(), rtol=_CLOSE, atol=_CLOSE
        )

    def _finish(self, checkpoint: Path) -> None:
        """Take what is known of the attention layers, and leave the head alone in `whole`."""
        prefix = self.whole.base_model_prefix
        if any(b.spec.scales for layer in self.layers.values() for _, b in layer):
            modules = {path: id(m) for path, m in self.base.named_modules()}
            self.scales.take(checkpoint, prefix, modules, self.build.shared.device)
        setattr(self.whole, prefix, _HiddenStates())

    def _take_decoder(self, prefix: str) -> None:
        """Set `base`, which runs in each step: the model without its head."""
        self.base = getattr(self.whole, prefix, self.whole)

    @torch.inference_mode()
    def _learn_layers(self, build: Builder, device: torch.device) -> None:
        """Run a few tokens and record the settings of each attention layer."""
        trace = AttentionTrace(build)
        positions = torch.arange(_PROBE, device=device)[None]
        name = self.config.model.__name__
        with explained(f"{name}: transformers' code for it does not run on our memory"):
            inputs = {"input_ids": (7 * positions + 11) % self.config.vocab_size}
            self._run(inputs, positions, trace)
            self.first_position = self._first_position(inputs, positions)
        if not trace.layers:
            raise UnsupportedError(f"{name} does not pass our arguments to its attention")
        self.layers = trace.layers

    def _first_position(self, inputs: Mapping[str, Any], positions: Tensor) -> int:
        """The number that the model gives a text's first token: not 0 where it reserves some.

        Raises UnsupportedError if its positions are not in order.
        """
        tables = [m for m in self.base.modules() if isinstance(m, torch.nn.Embedding)]
        if len(tables) < 2:
            return 0
        looked_up: list[list[Any]] = []
        for given in (positions, None):
            seen: list[Any] = []
            hooks = [
                table.register_forward_pre_hook(lambda _, ids, to=seen: to.append(*ids[:1] or (0,)))
                for table in tables
            ]
            try:
                self._run(inputs, given, AttentionTrace(None))
            finally:
                for hook in hooks:
                    hook.remove()
            looked_up.append(seen)
        offsets = {
            int(offset)
            for ours, own in zip(*looked_up, strict=True)
            if isinstance(ours, Tensor) and isinstance(own, Tensor) and own.shape == ours.shape
            for offset in (own - ours).flatten().tolist()
        } - {0}
        if len(offsets) > 1:
            raise UnsupportedError("its positions depend on more than the order of tokens")
        return offsets.pop() if offsets else 0

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states after the final norm: [tokens, hidden]."""
        if self.rows is not None:
            return self.rows.run(batch, self._inputs(batch).get("inputs_embeds"))
        if self.decoder is not None:
            return self.decoder.run(batch)
        if self.base is None:
            raise UnsupportedError("transformers' code runs once it has loaded the weights")
        step = AttentionStep(batch, self.layers, self.scales)
        return self._run(self._inputs(batch), self._positions(batch), step)

    def carry(self, batch: Batch) -> tuple[Tensor, ...]:
        return (self.forward(batch),)

    def embeddings(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.base.get_input_embeddings()(tokens)
        return embedded

    def _inputs(self, batch: Batch) -> Mapping[str, Any]:
        """The decoder's arguments for a step's tokens."""
        if batch.carried:
            return {"inputs_embeds": batch.carried[0][None]}
        if batch.embeds is None or batch.embeds_mask is None:
            return {"input_ids": batch.tokens[None]}
        embedded = self.base.get_input_embeddings()(batch.tokens)
        replaced = batch.embeds[:, : embedded.shape[1]].to(embedded.dtype)
        return {"inputs_embeds": torch.where(batch.embeds_mask[:, None], replaced, embedded)[None]}

    def _positions(self, batch: Batch) -> Tensor:
        """Position ids in the decoder's form: [1, tokens]."""
        positions = batch.positions[None]
        return positions + self.first_position if self.first_position else positions

    def _run(self, inputs: Mapping[str, Any], positions: Tensor | None, step: Any) -> Tensor:
        output = self.base(**inputs, position_ids=positions, use_cache=False, modulm=step)
        hidden: Tensor = output[0][0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the model's own head, with its scaling and softcap."""
        if self.joined:
            return hidden
        logits: Tensor = self.whole(inputs_embeds=hidden[None], use_cache=False).logits[0]
        # Tokens of media may have embeddings alone.
        missing = self.config.vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("smollm3", "SmolLM3ForCausalLM", no_rope_layers=[1, 1, 0])


def _hidden_states(output: Any) -> Tensor:
    """[tokens, hidden] of one row."""
    hidden: Tensor = output[0][0]
    return hidden


def logits_of(output: Any) -> Tensor:
    """[tokens, vocabulary] of one row."""
    logits: Tensor = output.logits[0]
    return logits


class _HiddenStates(Module):
    """Stands in for the decoder when only the head runs: returns its input."""

    @property
    def decoder(self) -> Module:
        """Itself, for models whose head calls the decoder inside."""
        return self

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
