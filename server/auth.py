"""API keys: every route is guarded unless it is listed here."""

import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.config.server import ServerConfig
from octavo.engine.core.errors import ConfigurationError
from octavo.server.errors import unauthorized
from octavo.server.middleware import path_in_app

OPEN_PATHS = frozenset({"/health", "/health/ready", "/ready", "/ping"})
"""Probes have no key; these paths say nothing but how the server is."""


def load_api_keys(config: ServerConfig) -> tuple[str, ...]:
    """Return all valid keys. Raises ConfigurationError when the key file cannot be used."""
    if config.api_key_file is None:
        return config.api_key
    try:
        lines = Path(config.api_key_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--api-key-file: cannot read it: {error}") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        # A server that was meant to be guarded must not come up open.
        raise ConfigurationError(
            f"--api-key-file {config.api_key_file} holds no key; write one key a line"
        )
    return config.api_key + keys


class AuthMiddleware:
    """ASGI middleware: answers 401 unless a valid bearer token came along."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it."""
        if scope["type"] == "lifespan" or self._is_open(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        await unauthorized().response()(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return not self._keys or path_in_app(scope) in OPEN_PATHS

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # Header values are latin-1 on the wire; keys may hold any character.
        given = token.strip().encode("latin-1")
        # All keys are compared, so the time says nothing about which one was near.
        return any([hmac.compare_digest(given, key) for key in self._keys])
