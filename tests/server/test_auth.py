"""Keys: every route but the probes, in every spelling."""

import logging
from pathlib import Path

import httpx
import pytest
from octavo_fixtures import byte_ids, token_id
from served_app import ServeApp
from starlette.routing import Route

from octavo.config.server import ServerConfig
from octavo.engine.core.errors import ConfigurationError
from octavo.server.auth import OPEN_PATHS, KeyStore
from octavo.server.lifecycle import Phase

HELLO = [*byte_ids("hello"), token_id("<|eos|>")]
KEY = "sk-Octavo"
TRICKS = [
    ("GET", "//v1/models"),
    ("GET", "/V1/models"),
    ("GET", "/v1/models/"),
    ("GET", "/v1/../v1/models"),
    ("GET", "/health/../v1/models"),
    ("GET", "/health/"),
    ("GET", "/ping/../metrics"),
    ("GET", "/health%2f..%2fmetrics"),
    ("HEAD", "/v1/models"),
    ("OPTIONS", "/v1/models"),
    ("GET", "/nothing/here"),
    ("DELETE", "/v1/models"),
]
BAD_HEADERS = [
    None,
    "",
    "Bearer",
    "Bearer wrong",
    f"Basic {KEY}",
    KEY,
    f"Bearer {KEY.lower()}",
    f"Bearer {KEY[:-1]}",
    f"Bearer {KEY}x",
    f"Bearer {KEY} {KEY}",
]


def bearer(value: str | None) -> dict[str, str]:
    return {} if value is None else {"Authorization": value}


async def test_g01_every_route_needs_the_key(serve_app: ServeApp) -> None:
    async with serve_app(api_key=(KEY,), enable_admin=True, admin_key="root") as served:
        described = served.app.openapi()["paths"]
        routes = [(method.upper(), path) for path in described for method in described[path]]
        routes += [
            (method, route.path)
            for route in served.app.routes
            if isinstance(route, Route)
            for method in route.methods or ()
        ]
        assert len(routes) > 15
        for method, path in routes + TRICKS:
            if path in OPEN_PATHS:
                continue
            answer = await served.client.request(method, path)
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("value", BAD_HEADERS)
async def test_g01_a_wrong_key_is_refused(serve_app: ServeApp, value: str | None) -> None:
    async with serve_app(api_key=(KEY,)) as served:
        answer = await served.client.get("/v1/models", headers=bearer(value))

    assert answer.status_code == 401


@pytest.mark.parametrize("value", [f"Bearer {KEY}", f"bearer {KEY}", "BEARER second"])
async def test_g01_any_of_the_keys_is_taken(serve_app: ServeApp, value: str) -> None:
    async with serve_app(api_key=(KEY, "second")) as served:
        answer = await served.client.get("/version", headers=bearer(value))

    assert answer.status_code == 200


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_g01_probes_need_no_key(serve_app: ServeApp, path: str) -> None:
    async with serve_app(api_key=(KEY,)) as served:
        answer = await served.client.get(path)

    assert answer.status_code in (200, 503)


async def test_g01_a_preflight_needs_no_key(serve_app: ServeApp) -> None:
    async with serve_app(api_key=(KEY,)) as served:
        answer = await served.client.options(
            "/v1/chat/completions",
            headers={"Origin": "http://a.example", "Access-Control-Request-Method": "POST"},
        )

    assert answer.status_code == 200


async def test_probes_are_open_under_a_root_path_too(serve_app: ServeApp) -> None:
    async with serve_app(api_key=(KEY,)) as served:
        transport = httpx.ASGITransport(served.app, root_path="/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://o") as client:
            probe = await client.get("/llm/health")
            models = await client.get("/llm/v1/models")

    assert probe.status_code != 401
    assert models.status_code == 401


async def test_g01_the_key_never_reaches_the_log(
    serve_app: ServeApp, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serve_app(api_key=(KEY,)) as served:
        await served.client.get("/version", headers=bearer(f"Bearer {KEY}"))
        await served.client.get("/version", headers=bearer(f"Bearer {KEY}-wrong"))

    assert KEY not in caplog.text


def test_keys_come_from_the_file_too_and_may_have_names(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# clients\none\n\n two \n # old\nalice:three\nan odd name:four\nbob:\n")
    store = KeyStore(ServerConfig(api_key=("zero",), api_key_file=str(path), admin_key="root"))

    found = {
        secret: key.name
        for secret in (
            *("zero", "one", "two", "# old", "three", "an odd name:four", "bob:", "root", "four"),
        )
        if (key := store.find(secret.encode())) is not None
    }
    assert found == {
        "zero": "key-1",
        "one": "key-2",
        "two": "key-3",
        "three": "alice",
        "an odd name:four": "key-5",
        "bob:": "key-6",
        "root": "admin",
    }


@pytest.mark.parametrize("content", [None, "", "\n \n", "# only a comment\n"])
def test_a_key_file_without_keys_stops_the_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)

    with pytest.raises(ConfigurationError, match="--api-key-file"):
        KeyStore(ServerConfig(api_key_file=str(path)))


def test_a_file_that_became_unusable_leaves_the_keys_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one")
    store = KeyStore(ServerConfig(api_key_file=str(path)))
    path.write_text("")

    with pytest.raises(ConfigurationError):
        store.reload()
    assert store.find(b"one") is not None


def test_an_admin_key_alone_lets_everybody_else_in() -> None:
    assert not KeyStore(ServerConfig(admin_key="root")).needs_key


async def test_an_own_key_has_an_own_share(serve_app: ServeApp, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alice:a\nbob:b\n")
    body = {"prompt": "abc", "max_tokens": 4, "temperature": 0}
    async with serve_app(HELLO, api_key_file=str(path), key_rpm=3) as served:
        await served.wait_for(Phase.READY)

        async def ask(key: str, **more: object) -> httpx.Response:
            return await served.client.post(
                "/v1/completions", json=body | more, headers=bearer(f"Bearer {key}")
            )

        batch = await ask("a", prompt=["one", "two"])
        over = await ask("a", prompt=["one", "two"])
        third = await ask("a")
        fourth = await ask("a")
        other = await ask("b")
        metrics = await served.client.get("/metrics", headers=bearer("Bearer b"))

    assert [r.status_code for r in (batch, over, third, fourth, other)] == [200, 429, 200, 429, 200]
    assert over.json()["error"]["code"] == "rate_limit_exceeded"
    assert over.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(over.headers["retry-after"]) <= 60
    assert 'requests_rejected_total{engine="0",model_name="fake",reason="key_limit"} 2.0' in (
        metrics.text
    )
