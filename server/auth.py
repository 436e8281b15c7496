"""API keys: every route is guarded unless it is listed here."""

import hmac
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.config.server import ServerConfig
from octavo.engine.core.errors import ConfigurationError
from octavo.server.context import current_request
from octavo.server.errors import unauthorized
from octavo.server.middleware import path_in_app

OPEN_PATHS = frozenset({"/health", "/health/ready", "/ready", "/ping"})
"""Probes have no key; these paths say nothing but how the server is."""

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_ADMIN_NAME = "admin"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One valid key. `name` is what logs and limits call it; the secret goes nowhere."""

    name: str
    secret: bytes
    is_admin: bool = False


class KeyStore:
    """The valid keys. Used on the event loop thread only.

    Raises ConfigurationError when the key file cannot be used.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._keys = _load_keys(config)

    @property
    def needs_key(self) -> bool:
        """True when clients must show a key; without any, everybody is let in."""
        return any(not key.is_admin for key in self._keys)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all keys."""
        return tuple(key.name for key in self._keys)

    def find(self, secret: bytes) -> ApiKey | None:
        """Return the key with this secret."""
        # All keys are compared, so the time says nothing about which one was near.
        found = [key for key in self._keys if hmac.compare_digest(secret, key.secret)]
        return found[0] if found else None

    def reload(self) -> None:
        """Read the key file again. Raises ConfigurationError and keeps the keys as they were."""
        self._keys = _load_keys(self._config)


def _load_keys(config: ServerConfig) -> tuple[ApiKey, ...]:
    given: list[tuple[str | None, str]] = [(None, key) for key in config.api_key]
    if config.api_key_file is not None:
        given += _read_file(config.api_key_file)
    keys = [
        ApiKey(name or f"key-{number}", secret.encode())
        for number, (name, secret) in enumerate(given, start=1)
    ]
    if config.admin_key is not None:
        # In front, so that a key that is both is the more powerful one.
        keys.insert(0, ApiKey(_ADMIN_NAME, config.admin_key.encode(), is_admin=True))
    return tuple(keys)


def _read_file(path: str) -> list[tuple[str | None, str]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--api-key-file: cannot read it: {error}") from error
    keys = list(_parse_lines(lines))
    if not keys:
        # A server that was meant to be guarded must not come up open.
        raise ConfigurationError(
            f"--api-key-file {path} holds no key; write one a line, as KEY or NAME:KEY"
        )
    return keys


def _parse_lines(lines: list[str]) -> Iterator[tuple[str | None, str]]:
    for line in map(str.strip, lines):
        name, colon, secret = line.partition(":")
        if colon and secret and _NAME.fullmatch(name):
            yield name, secret.strip()
        elif line and not line.startswith("#"):
            yield None, line


class AuthMiddleware:
    """ASGI middleware: answers 401 unless a valid bearer token came along."""

    def __init__(self, app: ASGIApp, keys: KeyStore) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it."""
        if scope["type"] == "lifespan" or self._admit(scope):
            await self._app(scope, receive, send)
            return
        await unauthorized().response()(scope, receive, send)

    def _admit(self, scope: Scope) -> bool:
        key = self._keys.find(_bearer_token(scope))
        if key is not None:
            context = current_request()
            context.key_name, context.is_admin = key.name, key.is_admin
            return True
        return not self._keys.needs_key or path_in_app(scope) in OPEN_PATHS


def _bearer_token(scope: Scope) -> bytes:
    scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
    # Header values are latin-1 on the wire; keys may hold any character.
    return token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
