"""Routes of other packages: they get what is left, and nobody takes over what is served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import httpx
import pytest

from modulm.config import EngineConfig
from modulm.errors import PluginConflict
from modulm.plugins import PluginManager
from modulm.plugins.manager import using
from modulm.testing.checkpoints import make_tokenizer
from modulm_server.app import create_app
from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
from modulm_server.testing import serve_in_thread
from modulm_tokenizers.tokenizer import load_tokenizer

FAMILY = """
    from fastapi import APIRouter
    from modulm_server.route import RouteFamily

    class Family(RouteFamily):
        name = {name!r}
        api = 2

        def router(self):
            router = APIRouter()
            for path in {paths!r}:
                router.add_api_route(path, self.answer, methods=["GET"])
            return router

        async def answer(self):
            return {name!r}
"""
HOOK = """
    from modulm.plugins import hookimpl
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    async def answer(request):
        return PlainTextResponse("hook")

    @hookimpl
    def modulm_app_created(app, config):
        app.router.routes.insert(0, Route("/v1/{what:path}", answer))
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ScriptedEngine:
    tokenizer = load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    return ScriptedEngine(tokenizer, lambda prompt, params: Reply(), scripted_info(tokenizer))


Serve = Callable[[], AbstractContextManager[httpx.Client]]


@pytest.fixture
def serve(engine: ScriptedEngine) -> Serve:
    @contextmanager
    def run() -> Iterator[httpx.Client]:
        config = EngineConfig.from_keywords(model="M")
        with (
            using(PluginManager()),
            serve_in_thread(engine, config) as live,
            live.client() as client,
        ):
            yield client

    return run


def add(install, name: str, *paths: str) -> None:
    module = f"mod_{name}"
    points = {"modulm.routes": {name: f"{module}:Family"}}
    install(f"modulm-{name}", points, {module: FAMILY.format(name=name, paths=paths)})


def test_a_pattern_gets_what_is_left(install, serve: Serve, caplog) -> None:
    add(install, "a_greedy", "/v1/{what:path}", "/{more:path}")
    with serve() as client:
        assert client.get("/v1/models").json()["object"] == "list"
        assert client.get("/health").status_code == 200
        assert client.get("/v1/nobodys").json() == "a_greedy"
    message = "GET /v1/{what:path} of routes 'a_greedy' also matches "
    assert message in caplog.text
    assert "which is served by routes" in caplog.text


def test_a_path_that_is_ours_is_left_out_with_a_warning(install, serve: Serve, caplog) -> None:
    add(install, "a_thief", "/v1/models")
    add(install, "b_thief", "/v1/models/{other}")
    with serve() as client:
        assert client.get("/v1/models").json()["object"] == "list"
    for name, path in (("a_thief", "/v1/models"), ("b_thief", "/v1/models/{other}")):
        message = f"GET {path} of routes {name!r} (modulm-{name} 1.0) is left out"
        assert message in caplog.text
    assert "served by routes 'openai'" in caplog.text


def test_a_route_that_a_pattern_hides_is_an_error(install, engine) -> None:
    add(install, "a_greedy", "/mine/{number:int}")
    add(install, "b_hidden", "/mine/7")
    with (
        using(PluginManager()),
        pytest.raises(PluginConflict, match="conflicts with GET /mine/{number"),
    ):
        create_app(engine, EngineConfig.from_keywords(model="M"))


def test_two_packages_with_one_family(install, engine) -> None:
    add(install, "twin", "/twin")
    install("modulm-other", {"modulm.routes": {"twin": "mod_twin:Other"}}, {})
    with using(PluginManager()), pytest.raises(PluginConflict, match="modulm-other 1.0"):
        create_app(engine, EngineConfig.from_keywords(model="M"))


def test_a_family_that_exits_is_left_out(install, serve: Serve, caplog) -> None:
    source = FAMILY.format(name="leaves", paths=("/leaves",)).replace(
        "router = APIRouter()", "raise SystemExit(1)"
    )
    points = {"modulm.routes": {"leaves": "mod_leaves:Family"}}
    install("modulm-leaves", points, {"mod_leaves": source})
    with serve() as client:
        assert client.get("/v1/models").status_code == 200
    assert "Routes leaves of modulm-leaves 1.0 are not served: SystemExit" in caplog.text


def test_a_hook_cannot_put_its_routes_in_front(install, serve: Serve, caplog) -> None:
    install("modulm-hook", {"modulm": {"front": "mod_front"}}, {"mod_front": HOOK})
    with serve() as client:
        assert client.get("/v1/models").json()["object"] == "list"
        assert client.get("/v1/nobodys").text == "hook"


def test_two_packages_with_one_name_are_in_the_log_and_in_health(install, serve, caplog) -> None:
    points = {"modulm.schedulers": {"twice": "mod_twice:Policy"}}
    install("modulm-one", points, {"mod_twice": "1 / 0"})
    install("modulm-two", {"modulm.schedulers": {"twice": "mod_two:Policy"}}, {})
    with serve() as client:
        assert client.get("/health").json() == {
            "status": "ok",
            "plugin_conflicts": ["schedulers/twice"],
        }
    message = "schedulers/twice is provided by modulm-one 1.0 and by modulm-two 1.0"
    assert sum(message in record.getMessage() for record in caplog.records) == 1
