"""Separates the thoughts of chat answers from their text, as the server does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from attrs import frozen

from modulm.contracts.parser import ParseContext
from modulm.plugins import manager
from modulm.plugins.moved import public_name

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.outputs import RequestOutput
    from modulm.contracts.sampling import SamplingParams
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["ThoughtReader"]

#: Characters of the prompt's end that a parser gets.
_TAIL = 512


@frozen
class ThoughtReader:
    """Parses answers with the reasoning parser `name`; `make`: `modulm_parsing.message_parser`."""

    name: str
    tokenizer: Tokenizer
    make: Callable[..., Any]

    @classmethod
    def of(cls, config: EngineConfig, tokenizer: Tokenizer) -> Self | None:
        """Create the reader of a model, by flag or by its checkpoint. None without a parser."""
        try:
            fitting = public_name("modulm_parsing.choice", "with_declared_parsers", __name__)
        except ImportError:
            return None
        name = fitting(config, manager.current()).structured_outputs.reasoning_parser
        if not name:
            return None
        return cls(name, tokenizer, public_name("modulm_parsing", "message_parser", __name__))

    def tuned(self, params: SamplingParams) -> SamplingParams:
        """Adapt sampling parameters: keep special tokens if the parser needs them."""
        reads = self._parser("", {}).special_tokens
        return params.with_(skip_special_tokens=False) if reads else params

    def split(self, output: RequestOutput, kwargs: Mapping[str, Any]) -> None:
        """Move the thoughts of each answer from its `text` to its `reasoning`."""
        for answer in output.outputs:
            if answer.finish_reason == "error":
                continue
            parser = self._parser(output.prompt or "", kwargs)
            events = [*parser.feed(answer.text), *parser.finish()]
            message = public_name("modulm_parsing", "assemble", __name__)(events)
            answer.text, answer.reasoning = message.content or "", message.reasoning

    def _parser(self, prompt: str, kwargs: Mapping[str, Any]) -> Any:
        context = ParseContext(
            prompt_tail=prompt[-_TAIL:], template_kwargs=kwargs, tokenizer=self.tokenizer
        )
        return self.make(context, None, self.name)
