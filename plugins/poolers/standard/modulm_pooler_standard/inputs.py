"""Turn texts and pairs of texts into pooling prompts, and their outputs into scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve

from modulm.contracts.outputs import PoolingOutput, PoolingRequestOutput, ScoringOutput
from modulm.contracts.pooler import PairContent, PoolingInputs, PoolingJob
from modulm.contracts.sampling import PoolingParams
from modulm.errors import ContextLengthExceeded, RequestError
from modulm_chat.conversation import encode_chat
from modulm_chat.sandbox import checkpoint_renderer

if TYPE_CHECKING:
    from modulm.contracts.engine_info import EngineInfo
    from modulm.contracts.requests import PromptLike
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["StandardInputs"]

#: Names of a checkpoint's prompts for the two texts of a pair, in order of preference.
_FIRST, _SECOND = ("query",), ("document", "passage", "corpus")
_Outputs = Sequence[PoolingRequestOutput]
_Part = tuple[list[int], PoolingParams]
_Side = str | PairContent


class StandardInputs(PoolingInputs):
    """Prompts for one engine. template: for pairs, takes precedence over the checkpoint's."""

    def __init__(
        self, info: EngineInfo, tokenizer: Tokenizer | None, template: str | None = None
    ) -> None:
        settings = info.config.model.pooler_config or {}
        self._info, self._rules = info, info.texts
        self._tokenizer = tokenizer
        self._template = template or info.texts.template
        self._chunked = bool(settings.get("enable_chunked_processing"))
        self._longest = settings.get("max_embed_len")

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer. Raises RequestError if it has none."""
        if self._tokenizer is None:
            raise RequestError("the server has no tokenizer: use prompt_token_ids", "prompt")
        return self._tokenizer

    def limit(self, params: PoolingParams) -> int | None:
        """Return the number of tokens to keep of a text; None for all, or for invalid values."""
        wanted = params.truncate_prompt_tokens
        return self._info.max_model_len if wanted == -1 else wanted or None

    def read(self, text: str, params: PoolingParams, add_special_tokens: bool = True) -> _Part:
        """Return the token ids of a text after the prompt that the request names, or the default
        one.
        """
        name = self._rules.default_prompt if params.prompt_name is None else params.prompt_name
        if name and name not in self._rules.prompts:
            known = ", ".join(self._rules.prompts) or "none"
            raise RequestError(
                f"prompt_name: {name!r:.60} is not one of the checkpoint's: {known}", "prompt_name"
            )
        prompt = self._rules.prompts[name] if name else ""
        ids, _ = self._fit([prompt + text], params, add_special_tokens)
        if prompt and not self._rules.pools_prompt:
            params = evolve(params, pool_from=self._length(prompt, add_special_tokens))
        return ids, params

    def job(self, ids: Sequence[int], params: PoolingParams) -> PoolingJob:
        limit = self.limit(params)
        if limit is not None and params.truncation_side == "left":
            return self._split(list(ids)[max(len(ids) - limit, 0) :], params)
        return self._split(list(ids)[:limit], params)

    def _split(self, ids: list[int], params: PoolingParams) -> PoolingJob:
        """Split a text that exceeds the model's maximum length, if enabled: its vector is the mean
        of the chunks' vectors, weighted by their lengths.
        """
        most = self._info.max_model_len
        if not self._chunked or params.task != "embed" or len(ids) <= most:
            return PoolingJob([(ids, params)])
        if self._longest is not None and len(ids) > self._longest:
            raise ContextLengthExceeded(
                f"the text has {len(ids)} tokens and max_embed_len is {self._longest}; shorten it "
                "or set truncate_prompt_tokens",
                "prompt",
            )
        plain = evolve(params, normalize=False, truncate_prompt_tokens=None)
        chunks = [ids[start : start + most] for start in range(0, len(ids), most)]
        return PoolingJob(
            [(chunk, plain) for chunk in chunks], lambda outputs: [self._mean(outputs, params)]
        )

    def pairs(
        self,
        left: Sequence[_Side],
        right: Sequence[_Side],
        params: PoolingParams,
        *,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> PoolingJob:
        """Score pairs with the model itself, or by similarity of one vector per text, or of all
        tokens' vectors.

        variables: additional variables for the template. Raises RequestError.
        """
        tasks, together = self._info.tasks, list(zip(left, right, strict=True))
        if "score" in tasks:
            pair_params = evolve(params, task="score")
            template = template or self._template
            return PoolingJob(
                [self._pair(pair, pair_params, template, variables) for pair in together], _scores
            )
        if not {"embed", "token_embed"} & set(tasks):
            raise RequestError(f"the model supports {', '.join(tasks)} only, not pairs", "model")
        task = "embed" if "embed" in tasks else "token_embed"
        similar = _SIMILARITIES[self._rules.similarity] if task == "embed" else _late
        unit = True if similar is _cosine else None
        pair_params = evolve(params, task=task, normalize=unit, use_activation=None)
        keys: dict[tuple[_Side, str | None], int] = {}
        ends = [
            (keys.setdefault((a, self._role(_FIRST, pair_params, a)), len(keys)),
             keys.setdefault((b, self._role(_SECOND, pair_params, b)), len(keys)))
            for a, b in together
        ]  # fmt: skip
        parts = [self._alone(side, evolve(pair_params, prompt_name=name)) for side, name in keys]
        return PoolingJob(
            parts, lambda outputs: [_score(outputs[a], outputs[b], similar) for a, b in ends]
        )

    # How it is done.

    def _alone(self, side: _Side, params: PoolingParams) -> tuple[PromptLike, PoolingParams]:
        """Return the prompt of one side."""
        return _with_media(*self.read(_text(side), _uncut(params, side)), side)

    def _role(self, names: Sequence[str], params: PoolingParams, side: _Side) -> str | None:
        """Return the checkpoint's prompt name for one side of a pair, unless the request names one.
        Only texts have prompts.
        """
        if isinstance(side, PairContent) and params.prompt_name is None:
            return ""
        known = (name for name in names if name in self._rules.prompts)
        return next(known, None) if params.prompt_name is None else params.prompt_name

    def _fit(
        self, texts: Sequence[str], params: PoolingParams, special: bool = True
    ) -> tuple[list[int], int | None]:
        lowered = [text.lower() if self._rules.lower_case else text for text in texts]
        side = "left" if params.truncation_side == "left" else "right"
        limit = self.limit(params)
        return self.tokenizer.fit(*lowered, add_special_tokens=special, limit=limit, side=side)

    def _length(self, prompt: str, special: bool) -> int:
        """Return the number of tokens of a prompt, including special tokens before it."""
        ids, _ = self._fit([prompt], PoolingParams(), special)
        return len(ids) - (bool(ids) and ids[-1] in self.tokenizer.special_ids)

    def _pair(
        self,
        pair: tuple[_Side, _Side],
        params: PoolingParams,
        template: str | None,
        variables: Mapping[str, Any] | None,
    ) -> tuple[PromptLike, PoolingParams]:
        params = _uncut(params, *pair)
        if template is None:
            texts = [_text(side) for side in pair]
            joined = ["".join(texts)] if self._rules.joined else texts
            ids, second = self._fit(joined, params)
            return _with_media(ids, evolve(params, second_text=second), *pair)
        first, second_text = pair
        ids = self._rendered(first, second_text, template, variables)
        limit = self.limit(params)
        if isinstance(first, PairContent) or isinstance(second_text, PairContent):
            return _with_media(ids, params, *pair)
        if limit is not None and len(ids) > limit:
            ids_kept = self.tokenizer.encode(second_text, False)[: limit - len(ids)]
            ids = self._rendered(first, self.tokenizer.decode(ids_kept), template, variables)
        return ids, params

    def _rendered(
        self, first: _Side, second: _Side, template: str, variables: Mapping[str, Any] | None
    ) -> list[int]:
        sides = {"query": first, "document": second}
        media = any(isinstance(side, PairContent) for side in sides.values())
        messages = [
            {"role": role, "content": side.parts if isinstance(side, PairContent) else side}
            for role, side in sides.items()
        ]
        renderer = checkpoint_renderer() if template == self._rules.template else None
        ids, _ = encode_chat(
            messages,
            tokenizer=self.tokenizer,
            template=template,
            run=None if renderer is None else renderer.render,
            form=None if renderer is None else renderer.content_format,
            add_generation_prompt=False,
            content="auto" if media else "string",
            kwargs=variables,
        )
        return ids

    def _mean(self, outputs: _Outputs, params: PoolingParams) -> PoolingRequestOutput:
        sizes = [len(output.prompt_token_ids) for output in outputs]
        vectors = np.stack([output.outputs.data for output in outputs])
        mean = np.average(vectors, axis=0, weights=sizes)
        wishes = (params.normalize, params.use_activation)
        default = self._info.description.pooling.get("normalize", True)
        if next((wish for wish in wishes if wish is not None), default):
            mean /= max(float(np.linalg.norm(mean)), 1e-12)
        ids = [token for output in outputs for token in output.prompt_token_ids]
        return PoolingRequestOutput(
            outputs[0].request_id, PoolingOutput(mean.astype(np.float32)), ids
        )


def _text(side: _Side) -> str:
    return side.text if isinstance(side, PairContent) else side


def _uncut(params: PoolingParams, *sides: _Side) -> PoolingParams:
    """Return the parameters. Raises RequestError if they truncate a prompt with media."""
    if params.truncate_prompt_tokens and any(isinstance(side, PairContent) for side in sides):
        raise RequestError("prompts with media cannot be truncated", "truncate_prompt_tokens")
    return params


def _with_media(
    ids: list[int], params: PoolingParams, *sides: _Side
) -> tuple[PromptLike, PoolingParams]:
    """Return the prompt of these ids with the media of its sides."""
    media = [one for side in sides if isinstance(side, PairContent) for one in side.media]
    if not media:
        return ids, params
    return {"prompt_token_ids": ids, "multi_modal_data": tuple(media)}, params


def _scores(outputs: _Outputs) -> list[PoolingRequestOutput]:
    for output in outputs:
        output.outputs = ScoringOutput(float(output.outputs.data.ravel()[0]))
    return list(outputs)


def _score(
    first: PoolingRequestOutput,
    second: PoolingRequestOutput,
    similar: Callable[[np.ndarray, np.ndarray], Any],
) -> PoolingRequestOutput:
    """Return the similarity of two outputs as one output for both."""
    score = float(similar(first.outputs.data, second.outputs.data))
    tokens = [*first.prompt_token_ids, *second.prompt_token_ids]
    name = f"{first.request_id}-{second.request_id}"
    return PoolingRequestOutput(name, ScoringOutput(score), tokens)


def _cosine(first: np.ndarray, second: np.ndarray) -> Any:
    """Cosine similarity of vectors of length 1."""
    return np.dot(first, second)


def _late(first: np.ndarray, second: np.ndarray) -> Any:
    """MaxSim (arXiv 2004.12832): sum over the first tokens of the similarity to their nearest
    second token. Both: [tokens, vector].
    """
    return (first @ second.T).max(axis=-1).sum()


_SIMILARITIES: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "cosine": _cosine,
    "dot": np.dot,
    "euclidean": lambda a, b: -np.linalg.norm(a - b),
    "manhattan": lambda a, b: -np.abs(a - b).sum(),
}
