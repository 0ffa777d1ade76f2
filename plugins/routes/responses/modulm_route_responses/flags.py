"""The flags of the responses API."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["ResponsesConfig"]


@flag_group
class ResponsesConfig(FlagGroup):
    """OpenAI's responses API."""

    title = "Responses"
    server = True

    stored_prompts: str | None = flag(
        None, "Folder of stored prompts (ID.json) for the `prompt` field of responses.", unit="path"
    )
