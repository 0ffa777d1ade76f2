"""Logs requests and their answers, where `--enable-log-requests` and the like ask for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from attrs import field, frozen

from modulm_server.auth import current_owner
from modulm_server.errors import escape
from modulm_server.flags import ServerConfig

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.outputs import RequestOutput
    from modulm.contracts.sampling import SamplingParams
    from modulm_frontend.beam_search import BeamSearchParams
    from modulm_server.prompts import Prompt

__all__ = ["RequestLog"]

log = logging.getLogger("modulm.requests")

#: Characters of a text that a line shows where the configuration sets no bound.
_LONGEST = 10_000
#: Hex digits of the digest of a key that tell its owner from others.
_SHOWN = 8


@frozen
class RequestLog:
    """Logs nothing, requests, or answers as well (and their deltas)."""

    requests: bool = False
    answers: bool = False
    deltas: bool = False
    longest: int = field(default=_LONGEST)

    @classmethod
    def of(cls, config: EngineConfig) -> RequestLog:
        """As configured."""
        server = config.group(ServerConfig)
        return cls(
            requests=config.observability.enable_log_requests,
            answers=server.enable_log_outputs,
            deltas=server.enable_log_outputs and server.enable_log_deltas,
            longest=_LONGEST if server.max_log_len is None else server.max_log_len,
        )

    def request(self, name: str, prompt: Prompt, params: SamplingParams | BeamSearchParams) -> None:
        """A request goes to the engine."""
        if self.requests:
            text = repr(list(prompt.ids)) if prompt.text is None else prompt.text
            whose = current_owner()[:_SHOWN]
            log.info(
                "request %s%s: %s, %s",
                name,
                f" of {whose}" if whose else "",
                escape(text, self.longest),
                escape(repr(params)),
            )

    def answer(self, name: str, output: RequestOutput, delta: bool) -> None:
        """The engine has answered; `delta`: with a piece of a stream."""
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
