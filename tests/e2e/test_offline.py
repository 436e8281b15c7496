"""A start where nothing can be reached and nothing can be written."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from octavo.loadtest.resilience.connection import ask
from octavo.loadtest.resilience.process import ServerProcess

GUARD = """
import os, socket

def note(what, target):
    with open(os.environ["ASKED_FOR"], "a") as file:
        print(what, target, file=file)

connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo

def guarded_connect(self, address):
    note("connect", address)
    return connect(self, address)

def guarded_getaddrinfo(host, *args, **kwargs):
    if host != "127.0.0.1":
        note("look up", host)
    return getaddrinfo(host, *args, **kwargs)

socket.socket.connect, socket.getaddrinfo = guarded_connect, guarded_getaddrinfo
note("guarded", os.getpid())
"""


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    files = (path for path in directory.rglob("*"))
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def test_g11_a_local_model_needs_neither_network_nor_a_place_to_write(
    random_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, asked_for = tmp_path / "guard", tmp_path / "asked for"
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(GUARD)
    monkeypatch.setenv("PYTHONPATH", str(guard))
    monkeypatch.setenv("ASKED_FOR", str(asked_for))
    # No user, not even the superuser, may write there.
    monkeypatch.setenv("HOME", "/proc/none")
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    before, beside = snapshot(random_llama_dir), set(os.listdir())

    server = ServerProcess((str(random_llama_dir), "--load-format", "null"))
    try:
        server.start()
        asyncio.run(server.wait_until_ready())
        body = {"prompt": "abc", "max_tokens": 2}
        reply = asyncio.run(ask(server.port, "/v1/completions", body))
        server.signal(signal.SIGTERM)
        code = asyncio.run(server.wait())
    finally:
        server.close()
        log = server.log.read_text()
        server.log.unlink()

    assert (reply.status, code) == (200, 0), log
    assert [line.split()[0] for line in asked_for.read_text().splitlines()] == ["guarded"]
    assert snapshot(random_llama_dir) == before
    assert set(os.listdir()) == beside | {asked_for.name}
