"""Logs requests and their outputs (`--enable-log-requests`, `--enable-log-outputs`)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from attrs import field, frozen

from modulm_server.errors import escape
from modulm_server.flags import ServerConfig
from modulm_server.key_limits import current_key

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.outputs import RequestOutput
    from modulm.contracts.sampling import SamplingParams
    from modulm_frontend.beam_search import BeamSearchParams
    from modulm_server.prompts import Prompt

__all__ = ["RequestLog"]

log = logging.getLogger("modulm.requests")

#: Default for the maximum characters of a text in a log line.
_LONGEST = 10_000


@frozen
class RequestLog:
    """Logs requests, outputs and streamed deltas, each if enabled."""

    requests: bool = False
    answers: bool = False
    deltas: bool = False
    longest: int = field(default=_LONGEST)

    @classmethod
    def of(cls, config: EngineConfig) -> RequestLog:
        """Create the log of a configuration."""
        server = config.group(ServerConfig)
        return cls(
            requests=config.observability.enable_log_requests,
            answers=server.enable_log_outputs,
            deltas=server.enable_log_outputs and server.enable_log_deltas,
            longest=_LONGEST if server.max_log_len is None else server.max_log_len,
        )

    def request(self, name: str, prompt: Prompt, params: SamplingParams | BeamSearchParams) -> None:
        """Log a request that goes to the engine."""
        if self.requests:
            text = repr(list(prompt.ids)) if prompt.text is None else prompt.text
            key = current_key()
            whose = "" if key is None else key.name
            log.info(
                "request %s%s: %s, %s",
                name,
                f" of {whose}" if whose else "",
                escape(text, self.longest),
                escape(repr(params)),
            )

    def answer(self, name: str, output: RequestOutput, delta: bool) -> None:
        """Log an output of the engine. delta: it is a piece of a stream."""
        if not (self.deltas if delta else self.answers):
            return
        for choice in output.outputs:
            log.info(
                "answer %s[%d]: %s%s",
                name,
                choice.index,
                escape(choice.text, self.longest),
                f" ({choice.finish_reason})" if choice.finish_reason else "",
            )
