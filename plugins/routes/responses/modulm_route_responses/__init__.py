"""OpenAI's responses API: create, stream, retrieve, cancel, delete, background, chains of turns."""

from modulm_route_responses.family import Responses

__all__ = ["Responses"]
