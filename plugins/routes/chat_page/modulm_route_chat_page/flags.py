"""The flags of the chat page: `config.group(ChatPageConfig)`."""

from __future__ import annotations

import re

from modulm.contracts.flags import FlagGroup, flag, flag_group
from modulm.errors import ConfigError

__all__ = ["ChatPageConfig"]

_ORIGIN = re.compile(
    r"https?://(\*\.)?[A-Za-z0-9.-]+(:(\d+|\*))?|https?://\[[0-9a-fA-F:]+\](:\d+)?"
)


@flag_group
class ChatPageConfig(FlagGroup):
    """The web page at `/`."""

    title = "Chat page"
    server = True

    chat_page_tool_origins: tuple[str, ...] = flag(
        (),
        "Other origins whose tools the chat page may call, such as http://localhost:9000.",
    )

    chat_store: str | None = flag(
        None,
        "SQLite file for the chat page's conversations, apart for each API key, so that they are "
        "the same in every browser. Default: only the browser stores them.",
        unit="path",
    )

    def __attrs_post_init__(self) -> None:
        for origin in self.chat_page_tool_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "chat_page_tool_origins", f"{origin!r} is not an origin (scheme, host and port)"
                )
