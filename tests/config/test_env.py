"""What is read from and written to the environment."""

import os

import pytest

from octavo.config import env


def test_only_our_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "1")
    monkeypatch.setenv("PORT", "2")

    assert env.octavo_variables().get("OCTAVO_PORT") == "1"
    assert "PORT" not in env.octavo_variables()


def test_thread_settings_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    env.set_thread_defaults()

    assert (os.environ["OMP_WAIT_POLICY"], os.environ["OMP_NUM_THREADS"]) == ("ACTIVE", "3")


@pytest.mark.parametrize(("usable", "expected"), [(1, "1"), (4, None)])
def test_threads_are_limited_where_cores_are(
    monkeypatch: pytest.MonkeyPatch, usable: int, expected: str | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    env.set_thread_defaults()

    assert os.environ.get("OMP_NUM_THREADS") == expected


def test_the_cache_folder_follows_the_xdg_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert env.cache_root() == "/somewhere"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/a")
    assert env.cache_root() == "/home/a/.cache"
