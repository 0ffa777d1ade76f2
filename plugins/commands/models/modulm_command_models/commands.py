"""`modulm ps`, `load`, `stop` and `reload`: ask a running server for its models."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    import httpx

__all__ = ["load", "ps", "reload", "stop"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_CONNECT_TIMEOUT = 10.0
_COLUMNS = ("NAME", "STATE", "MEMORY", "REQUESTS", "LAST USE", "UNTIL")


def _of_server(function: _Function) -> _Function:
    """Add the options that say which server."""
    for option in (
        click.option("--api-key", help="Key for the server.", envvar="MODULM_API_KEY"),
        click.option(
            "--url",
            default="http://127.0.0.1:8000",
            show_default=True,
            envvar="MODULM_URL",
            help="Address of the server.",
        ),
    ):
        function = option(function)
    return function


@click.command("ps")
@_of_server
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ps(url: str, api_key: str | None, as_json: bool) -> None:
    """List the models of a running server: their state, memory and last use."""
    cards = _ask(url, api_key, "GET", "/v1/models")["data"]
    models = [_row(card) for card in cards if card["id"] == card["root"]]
    if as_json:
        click.echo(json.dumps([card for card in cards if card["id"] == card["root"]], indent=2))
        return
    rows = [_COLUMNS, *models]
    widths = [max(len(row[index]) for row in rows) for index in range(len(_COLUMNS))]
    for row in rows:
        click.echo("  ".join(map(str.ljust, row, widths)).rstrip())
    for card in cards:
        status = card.get("status", {})
        if status.get("error") and card["id"] == card["root"]:
            click.echo(f"{card['id']}: {status['error']}")
    _show_budget(cards)


def _row(card: dict[str, Any]) -> tuple[str, ...]:
    status = card.get("status")
    if status is None:  # a server of one model
        return (card["id"], "loaded", "-", "-", "-", "the server stops")
    now = time.time()
    expires = status["expires_at"]
    until = "stopped" if status["pinned"] else "room is needed"
    if expires is not None:
        until = f"in {_duration(max(0.0, expires - now))}"
    used = status["last_used"]
    estimated = "" if status["value"] in ("loaded", "sleeping", "stopping") else "about "
    waiting = f"+{status['waiting_requests']}" if status["waiting_requests"] else ""
    return (
        card["id"],
        status["value"],
        f"{estimated}{status['memory'] / 2**20:.0f} MiB" if status["memory"] else "-",
        f"{status['active_requests']}{waiting}",
        "never" if used is None else f"{_duration(now - used)} ago",
        until if status["value"] == "loaded" else "-",
    )


def _show_budget(cards: list[dict[str, Any]]) -> None:
    statuses = {card["root"]: card["status"] for card in cards if "status" in card}
    budgets = [status["memory_budget"] for status in statuses.values()]
    if budgets and budgets[0] is not None:
        held = ("loaded", "sleeping", "loading", "stopping")
        used = sum(s["memory"] for s in statuses.values() if s["value"] in held)
        click.echo(f"{used / 2**20:.0f} of {budgets[0] / 2**20:.0f} MiB")


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@click.command("load")
@click.argument("model")
@_of_server
def load(model: str, url: str, api_key: str | None) -> None:
    """Load MODEL of a running server, and wait until it is loaded."""
    _act(url, api_key, "/models/load", model)


@click.command("stop")
@click.argument("model")
@_of_server
def stop(model: str, url: str, api_key: str | None) -> None:
    """Stop MODEL of a running server, when its running requests have ended.

    The next request for it loads it again.
    """
    _act(url, api_key, "/models/unload", model)


def _act(url: str, api_key: str | None, path: str, model: str) -> None:
    outcome = _ask(url, api_key, "POST", path, {"model": model})
    memory = f", {outcome['memory'] / 2**20:.0f} MiB" if outcome["state"] == "loaded" else ""
    click.echo(f"{outcome['model']}: {outcome['state']}{memory}")


@click.command("reload")
@_of_server
def reload(url: str, api_key: str | None) -> None:
    """Let a running server read the settings of its models again.

    Running requests continue.
    """
    changes = _ask(url, api_key, "POST", "/models/reload", {})
    lines = [f"{kind}: {', '.join(names)}" for kind, names in changes.items() if names]
    click.echo("\n".join(lines) or "nothing has changed")


def _ask(
    url: str, api_key: str | None, method: str, path: str, body: dict[str, Any] | None = None
) -> Any:
    """Send a request and return the answer's JSON. Raises click.ClickException."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT)
    base = url.rstrip("/").removesuffix("/v1")
    try:
        answer = httpx.request(method, base + path, json=body, headers=headers, timeout=timeout)
    except httpx.HTTPError as error:
        message = f"no answer from {base}: {error}; --url names another server"
        raise click.ClickException(message) from error
    if answer.is_error:
        raise click.ClickException(_reason(answer, path))
    return answer.json()


def _reason(answer: httpx.Response, path: str) -> str:
    try:
        error = answer.json()["error"]
        message = str(error["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code}: {answer.text[:200]}"
    if answer.status_code == 404 and path.startswith("/models/") and error.get("code") is None:
        return "this server has one model: start it with several, or with --models-config"
    return message
