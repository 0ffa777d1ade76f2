"""config.json as the transformers library reads it."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any, Self

from attrs import field, frozen

from modulm.errors import CheckpointError, UnsupportedError
from modulm.plugins import current
from modulm_transformers.conversions import Conversions
from modulm_transformers.names import class_name
from modulm_transformers.unsupported import reasons

__all__ = ["RemoteConfig", "TransformersConfig"]

#: Entries of `auto_map` that the bridge supports.
_REMOTE_MODEL = "AutoModelForCausalLM"
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_FALLBACK_LENGTH = 2048
#: Axes of positions where a model names none: time, height and width.
_AXES = ("time", "height", "width")
#: Model types whose images attend in both directions, whole.
_BOTH_WAYS = frozenset({"molmo2"})
#: Model types whose sounds are embedded like images.
_HEARS = frozenset({"muse_spark"})
#: Layer types whose mask reaches attention as an argument.
_KINDS = frozenset({"full_attention", "sliding_attention"})
#: Arguments of an encoder-decoder of texts.
_TEXTS = frozenset({"input_ids", "decoder_input_ids"})
#: Keys that only configurations of speech models have.
_SPEECH = {"num_mel_bins", "feat_extract_norm"}
_UNEXPLAINED = "an encoder-decoder or a speech model: no package of this project supports it"
#: Suffixes of architectures that return vectors or classes.
_DIFFUSION = "ForBlockDiffusion"
_POOLING = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")


@frozen(eq=False)
class TransformersConfig:
    """The model's class in transformers, its configuration object, and the engine's properties.

    sees: whether it takes images. axes: of positions. both_ways: whether the tokens of an image
    attend in both directions. hears: whether it takes sounds.
    """

    model: Any
    settings: Any
    vocab_size: int
    max_length: int
    sliding_window: int | None
    generates: bool = True
    sees: bool = False
    axes: int = 1
    both_ways: bool = False
    hears: bool = False
    #: Why the model runs row by row with the library's caches; "" if our attention can run it.
    rows: str = ""
    #: Whether it reads the output of an encoder of texts.
    crosses: bool = False
    #: How stored names become the model's; filled when the model is built.
    conversions: Conversions = field(factory=Conversions)

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> TransformersConfig:
        """Parse the table; runs no code of the checkpoint.

        Raises UnsupportedError for an architecture that cannot be bridged, CheckpointError for
        values that transformers rejects.
        """
        import transformers

        name = str(table["architectures"][0])
        model = getattr(transformers, class_name(name), None)
        if name in reasons():
            raise UnsupportedError(f"{name}: {reasons()[name]}")
        if model is None:
            remote_hint = (
                "; code that comes with a checkpoint runs with --trust-remote-code, and without "
            )
            hint = f"{remote_hint}--model-impl" if table.get("auto_map") else ""
            raise UnsupportedError(f"the installed transformers has no {name}{hint}")
        return cls.of(name, model, table, file)

    @classmethod
    def of(cls, name: str, model: Any, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json for a class of models; raises as `from_table` does."""
        try:
            settings = model.config_class.from_dict(_plain(table))
            accepted = signature(model.forward).parameters.keys()
            crosses, reads_two = accepted >= _TEXTS, "decoder_input_ids" in accepted
            text = settings.get_text_config(decoder=True) if crosses else settings.get_text_config()
        except Exception as error:
            raise CheckpointError(f"{file}: {error}") from error
        if not isinstance(getattr(text, "vocab_size", None), int):
            raise UnsupportedError(f"{name}: not a text model: {file} has no vocab_size")
        if name.endswith(_DIFFUSION):
            raise UnsupportedError(f"{name}: not supported yet: block diffusion")
        generates = model.can_generate() or not name.endswith(_POOLING)
        crosses = crosses and generates
        known = {**settings.to_dict(), "is_encoder_decoder": reads_two and not crosses}
        if known["is_encoder_decoder"] or _SPEECH & known.keys():
            kind = current().hook.modulm_explain_model(config=known)
            raise UnsupportedError(f"{name} is {kind or _UNEXPLAINED}")
        rows = _why_rows(name, model, text, crosses) if generates else ""
        media = _media(name, settings, text)
        if media.get("sees") and rows:
            raise UnsupportedError(f"{name}: not supported yet with images: {rows}")
        values = text.to_dict()
        lengths = [values[key] for key in _LENGTH_KEYS if isinstance(values.get(key), int)]
        window = values.get("sliding_window")
        return cls(
            model,
            settings,
            text.vocab_size + int(values.get("additional_vocab_size") or 0),
            min(lengths, default=_FALLBACK_LENGTH),
            window if isinstance(window, int) and window > 0 else None,
            generates,
            rows=rows,
            crosses=crosses,
            **media,
        )


def _media(name: str, settings: Any, text: Any) -> dict[str, Any]:
    """Whether the library has image encoders around the decoder, and the axes of positions."""
    from transformers import MODEL_MAPPING

    around = MODEL_MAPPING.get(type(settings), None)
    if text is settings or not hasattr(around, "get_image_features"):
        return {}
    counts = hasattr(around, "get_rope_index")
    if settings.model_type in _BOTH_WAYS:
        return {"sees": True, "both_ways": True}
    parameters = signature(around.forward).parameters
    if "token_type_ids" in parameters or ("mm_token_type_ids" in parameters and not counts):
        raise UnsupportedError(f"{name}: not supported yet: bidirectional attention over images")
    rotary = getattr(text, "rope_parameters", None) or {}
    axes = len(rotary.get("mrope_section") or _AXES) if counts else 1
    if axes not in (1, 3, 4):
        raise UnsupportedError(f"{name}: mrope_section: positions on {axes} axes")
    return {"sees": True, "axes": axes, "hears": settings.model_type in _HEARS}


@frozen(eq=False)
class RemoteConfig(TransformersConfig):
    """Like `TransformersConfig`, for a model with code in the checkpoint, which is executed
    here.
    """

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> RemoteConfig:
        """Parse the table. Raises CheckpointError if the code that config.json names cannot be
        imported.
        """
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        codes = table.get("auto_map")
        folder = str(Path(file).parent)
        classes = {}
        for role in (_REMOTE_MODEL, "AutoConfig"):
            code = codes.get(role) if isinstance(codes, Mapping) else None
            if not isinstance(code, str):
                raise CheckpointError(f"{file}: auto_map: names no {role}")
            try:
                classes[role] = get_class_from_dynamic_module(code, folder, local_files_only=True)
            except Exception as error:
                raise CheckpointError(f"{file}: auto_map: {code}: {error}") from error
        model = classes[_REMOTE_MODEL]
        model.config_class = classes["AutoConfig"]
        return cls.of(model.__name__, model, table, file)


def _why_rows(name: str, model: Any, text: Any, crosses: bool) -> str:
    """Why our attention cannot replace the model's, or "".

    Raises UnsupportedError for a model that cannot generate text.
    """
    if not model.can_generate():
        raise UnsupportedError(f"{name}: transformers has no generation for it")
    if not getattr(text, "is_causal", True):
        raise UnsupportedError(f"{name}: is_causal: not supported yet: false")
    if crosses:
        return "an encoder-decoder"
    if not model.is_backend_compatible():
        return "its attention does not go through transformers' attention interface"
    if getattr(model, "_is_stateful", False):
        return "it has states besides keys and values"
    kinds = set(text.to_dict().get("layer_types") or ()) - _KINDS
    return f"layers of kind {', '.join(sorted(kinds))}" if kinds else ""


def _plain(value: Any) -> Any:
    """Convert infinities from transformers' {"__float__": "Infinity"} to numbers."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
