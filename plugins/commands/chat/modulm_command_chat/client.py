"""A small client of OpenAI's API, for `chat`, `complete` and `bench`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import httpx

__all__ = ["Client", "error_text"]

_CONNECT_TIMEOUT = 10.0


class Client:
    """A client of the API at `url` (including `/v1`). Failures are raised as click errors."""

    def __init__(self, url: str, key: str | None) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT)
        self._url = url.rstrip("/")
        self._http = httpx.Client(headers=headers, timeout=timeout)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def first_model(self) -> str:
        """The first model that the server lists."""
        import httpx

        try:
            answer = self._http.get(f"{self._url}/models")
        except httpx.HTTPError as error:
            raise click.ClickException(f"no answer from {self._url}: {error}") from error
        self._check(answer)
        models = answer.json().get("data", [])
        if not models or "id" not in models[0]:
            self._check_url()
            raise click.ClickException(f"{self._url} serves no model")
        return str(models[0]["id"])

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed answer; closing the iterator cancels it."""
        import httpx

        options = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._http.stream("POST", f"{self._url}{path}", json=options) as answer:
                if answer.is_error:
                    answer.read()
                self._check(answer)
                yield from self._checked(_chunks(answer))
        except httpx.HTTPError as error:
            raise click.ClickException(f"lost {self._url}: {error}") from error

    def _check(self, answer: httpx.Response) -> None:
        if not answer.is_error:
            return
        if answer.status_code in (404, 405):
            self._check_url()
        try:
            text = error_text(answer.json())
        except ValueError:
            text = answer.text[:200]
        raise click.ClickException(f"{answer.status_code}: {text}")

    def _checked(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield chunks; raises for those of another API, such as llama.cpp's /completions."""
        for chunk in chunks:
            if "choices" not in chunk:
                self._check_url()
            yield chunk

    def _check_url(self) -> None:
        """Raise an error with a hint if the URL lacks the API's path."""
        if not self._url.endswith("/v1"):
            raise click.ClickException(
                f"{self._url} does not respond like OpenAI's API: try --url {self._url}/v1"
            )


def _chunks(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise click.ClickException(error_text(chunk))
        yield chunk


def error_text(body: Any) -> str:
    """The message in an OpenAI error body."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
