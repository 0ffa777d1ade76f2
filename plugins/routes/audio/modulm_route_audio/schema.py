"""Request forms of OpenAI's audio API, with vLLM's additional fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.datastructures import FormData, UploadFile

from modulm.contracts.sampling import OutputKind, SamplingParams
from modulm_server.json_body import bad_field, to_struct
from modulm_server.sampling import LIMITS, reject_unsupported
from modulm_speech.transcriber import Task

__all__ = ["FORM", "Form", "read_form"]

_LISTS = ("include", "timestamp_granularities")
_PROMPT = 1 << 14


class Form(Struct, kw_only=True):
    """The fields of `/v1/audio/transcriptions` and `/v1/audio/translations`, besides the file."""

    model: str | UnsetType = UNSET
    language: Annotated[str, Meta(max_length=64)] | None = None
    to_language: Annotated[str, Meta(max_length=64)] | None = None
    prompt: Annotated[str, Meta(max_length=_PROMPT)] = ""
    response_format: Literal["diarized_json", "json", "text", "srt", "verbose_json", "vtt"] = "json"
    timestamp_granularities: list[Literal["segment", "word"]] = []
    include: list[Literal["logprobs"]] = []
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stream: bool = False
    stream_include_usage: bool = False
    stream_continuous_usage_stats: bool = False
    use_beam_search: bool = False
    n: Annotated[int, Meta(ge=1, le=LIMITS.n)] = 1
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    vllm_xargs: str | None = None
    hotwords: str | None = None
    chunking_strategy: str | None = None
    user: Annotated[str, Meta(max_length=LIMITS.metadata_value)] | None = None

    def check(self, task: Task) -> None:
        """Raise ApiError(400) for unsupported fields and combinations."""
        reject_unsupported(self, "use_beam_search", "hotwords", "vllm_xargs")
        if self.n != 1:
            raise bad_field("n", "n must be 1: an audio file has one transcript")
        if self.chunking_strategy not in (None, "auto"):
            message = "chunking_strategy must be auto, which splits long audio at pauses"
            raise bad_field("chunking_strategy", message, "unsupported")
        if self.length_penalty != 1:
            raise bad_field("length_penalty", "length_penalty needs use_beam_search: true")
        if self.to_language not in (None, "en", "english") or (
            self.to_language is not None and task == "transcribe"
        ):
            raise bad_field(
                "to_language", "to_language is only for translations, and must be English"
            )
        if self.stream and self.response_format not in ("json", "text"):
            message = f"stream is not supported with response_format {self.response_format}"
            raise bad_field("stream", message)
        for name in ("stream_include_usage", "stream_continuous_usage_stats"):
            if getattr(self, name) and not self.stream:
                raise bad_field(name, f"{name} needs stream: true")
        if self.timestamp_granularities and self.response_format != "verbose_json":
            message = "timestamp_granularities needs response_format verbose_json"
            raise bad_field("timestamp_granularities", message)
        if self.include and self.response_format != "json":
            raise bad_field("include", "include: logprobs needs response_format json")

    @property
    def timed(self) -> bool:
        """Whether segment timestamps are requested."""
        return self.response_format in ("diarized_json", "srt", "verbose_json", "vtt")

    def choices(self) -> list[str]:
        """The fields that choose among what a model may answer."""
        asked = {"temperature": self.temperature, "include": self.include}
        chosen = self.sampling().keys() - {"max_tokens", "output_kind"}
        return [*chosen, *(name for name, value in asked.items() if value)]

    def sampling(self) -> dict[str, Any]:
        """The requested fields of SamplingParams, besides the temperature."""
        names = (
            "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
            "repetition_penalty",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        chosen = {name: value for name, value in values.items() if value is not None}
        kind = OutputKind.DELTA if self.stream else OutputKind.FINAL_ONLY
        return {**chosen, "max_tokens": self.max_completion_tokens, "output_kind": kind}


def read_form(form: FormData) -> tuple[UploadFile, Form]:
    """Read the file and the fields of a form. Raises ApiError(400) naming the field."""
    file = form.get("file")
    if not isinstance(file, UploadFile):
        problem = "is missing" if file is None else "must be a file with a file name"
        raise bad_field("file", f"file: {problem}")
    values: dict[str, Any] = {}
    for key, value in form.multi_items():
        name = key.removesuffix("[]")
        if name == "file":
            continue
        if not isinstance(value, str):
            raise bad_field(name, f"{name} must not be a file")
        if name in _LISTS:
            values.setdefault(name, []).append(value)
        elif name in values:
            raise bad_field(name, f"{name} was sent twice")
        else:
            values[name] = value
    return file, to_struct(values, Form, strict=False)


def _schema() -> dict[str, Any]:
    shape = msgspec.json.schema(Form)["$defs"]["Form"]
    fields = {
        f"{name}[]" if name in _LISTS else name: schema
        for name, schema in shape["properties"].items()
    }
    fields["file"] = {"type": "string", "format": "binary"}
    body = {"type": "object", "properties": fields, "required": ["file"]}
    content = {"multipart/form-data": {"schema": body}}
    return {"requestBody": {"required": True, "content": content}}


#: `openapi_extra` of the routes that read the form.
FORM = _schema()

#: The default seed, so that the same audio gives the same text.
SEED = 0


def with_temperature(params: dict[str, Any], temperature: float) -> SamplingParams:
    """Build the sampling parameters of one attempt."""
    drawn = {"seed": SEED, **params} if temperature > 0 else params
    return SamplingParams(**{**drawn, "temperature": temperature})
