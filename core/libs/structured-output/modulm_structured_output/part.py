"""Step part of structured output: provides the grammars of requests to the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from modulm.contracts.sampling import SamplingParams
from modulm.contracts.step_part import BuiltModel, PartRunner, StepPart
from modulm.errors import RequestError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.executor import RowStart
    from modulm.contracts.grammar import Grammar
    from modulm.contracts.sampling import StructuredOutputs
    from modulm.plugins.manager import PluginManager
    from modulm_structured_output.compiler import ConstraintCompiler, RequestGrammars

__all__ = ["GrammarRunner", "StructuredOutputPart"]


class StructuredOutputPart(StepPart):
    """Step part of structured output, always on.

    Grammar backends and the tokenizer are loaded for the first constraint.
    """

    name = "structured_output"
    api = 1

    def __init__(self, config: EngineConfig, plugins: PluginManager) -> None:
        from modulm_structured_output.compiler import RequestGrammars

        self._config, self._plugins = config, plugins
        self._vocabulary = 0
        self._grammars = RequestGrammars(self._open_compiler)

    @classmethod
    def opened(cls, config: Any, plugins: Any) -> Self:
        return cls(config, plugins)

    def runner(self, built: BuiltModel) -> GrammarRunner:
        self._vocabulary = built.loaded.vocabulary
        return GrammarRunner(self._grammars)

    def prepare(self, request: str, constraint: StructuredOutputs) -> Future[None]:
        return self._grammars.prepare(request, constraint)

    def forget(self, request: str) -> None:
        self._grammars.forget(request)

    def close(self) -> None:
        self._grammars.close()

    def _open_compiler(self) -> ConstraintCompiler:
        """Create the compiler.

        Raises RequestError without a tokenizer, UnsupportedError without a backend.
        """
        from modulm.engine.sampling.end_ids import end_ids
        from modulm.loading import open_checkpoint
        from modulm_structured_output.compiler import open_compiler
        from modulm_tokenizers.tokenizer import open_tokenizer

        config = self._config
        checkpoint = open_checkpoint(config, self._plugins)
        tokenizer = open_tokenizer(config, str(checkpoint.path))
        if tokenizer is None:
            raise RequestError("structured outputs need a tokenizer", "structured_outputs")
        eos = end_ids(config, checkpoint.generation_config, checkpoint.config)
        stops = tuple(dict.fromkeys((*tokenizer.stop_ids, *eos)))
        return open_compiler(config, tokenizer, self._vocabulary, stops, self._plugins)


class GrammarRunner(PartRunner):
    """Provides the grammars of rows to the sampler."""

    def __init__(self, grammars: RequestGrammars) -> None:
        self._grammars = grammars

    def grammar(self, start: RowStart) -> Grammar | None:
        params = start.params
        if not isinstance(params, SamplingParams) or params.structured_outputs is None:
            return None
        return self._grammars.of(start, params.structured_outputs)
