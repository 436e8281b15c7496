import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result
from scripted_server import (
    Answer,
    Asked,
    Route,
    ScriptedServer,
    error_answer,
    json_answer,
    serve,
    stream_answer,
)

from octavo.server.terminal.chat import ChatSession
from octavo.server.terminal.client import Client, ClientError
from octavo.server.terminal.commands import chat, complete
from octavo.server.terminal.screen import Screen

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def text(value: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": finish_reason}]}


def echo(asked: Asked) -> Answer:
    """The last message, said back in two chunks."""
    said = asked.body["messages"][-1]["content"]
    return stream_answer(
        delta(role="assistant", content=""),
        delta(content="you said: "),
        delta(content=said),
        delta("stop"),
    )


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    routes: dict[str, Route] = {
        "/v1/models": json_answer({"data": [{"id": "first"}, {"id": "second"}]}),
        CHAT: echo,
        COMPLETIONS: stream_answer(text(" upon"), text(" a time"), text("", "stop")),
    }
    with serve(**routes) as running:
        yield running


def invoke(command: Any, url: str, *arguments: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(command, ["--url", url, *arguments], input=typed)


def converse(server: ScriptedServer, *lines: str, system: str | None = None) -> list[Any]:
    """The messages of each request of a conversation with these lines."""
    with Client(server.url) as client:
        session = ChatSession(client, Screen(), {"model": "first"}, system)
        session.converse(lines)
    return [body["messages"] for body in server.bodies(CHAT)]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


# Single questions


def test_a_message_is_answered_on_standard_output(server: ScriptedServer) -> None:
    result = invoke(chat, server.url, "hi")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "you said: hi\n", "")


def test_piped_text_is_one_message(server: ScriptedServer) -> None:
    result = invoke(chat, server.url, typed="two\nlines\n")
    assert result.stdout == "you said: two\nlines\n"
    assert [body["messages"] for body in server.bodies(CHAT)] == [[user("two\nlines")]]


@pytest.mark.parametrize("command", [chat, complete])
def test_empty_standard_input_is_refused(server: ScriptedServer, command: Any) -> None:
    result = invoke(command, server.url, typed=" \n")
    assert result.exit_code == 2
    assert "standard input is empty" in result.stderr


def test_options_become_fields(server: ScriptedServer) -> None:
    options = "--temperature 0.5 --top-p 0.9 --max-tokens 7 --seed 3 --system brief --model second"
    invoke(chat, server.url, *options.split(), "hi")
    assert server.bodies(CHAT) == [
        {
            "messages": [{"role": "system", "content": "brief"}, user("hi")],
            "model": "second",
            "max_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 3,
            "stream": True,
        }
    ]


def test_options_that_are_not_given_are_not_sent(server: ScriptedServer) -> None:
    invoke(chat, server.url, "hi")
    assert server.bodies(CHAT) == [{"messages": [user("hi")], "model": "first", "stream": True}]


def test_complete_continues_a_text(server: ScriptedServer) -> None:
    for result in (
        invoke(complete, server.url, "Once"),
        invoke(complete, server.url, typed="Once\n"),
    ):
        assert (result.exit_code, result.stdout) == (0, " upon a time\n")
    expected = {"prompt": "Once", "model": "first", "max_tokens": 128, "stream": True}
    assert server.bodies(COMPLETIONS) == [expected] * 2


def test_url_may_end_in_v1(server: ScriptedServer) -> None:
    assert invoke(chat, f"{server.url}/v1/", "hi").exit_code == 0


def test_key_is_sent(server: ScriptedServer) -> None:
    invoke(chat, server.url, "--api-key", "secret", "hi")
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer secret"}


def test_a_cut_answer_is_said(server: ScriptedServer) -> None:
    server.routes[CHAT] = stream_answer(delta(content="half"), delta("length"))
    result = invoke(chat, server.url, "hi")
    assert result.stdout == "half\n"
    assert "limit of tokens" in result.stderr


def test_thinking_is_left_out_of_piped_output(server: ScriptedServer) -> None:
    server.routes[CHAT] = stream_answer(delta(reasoning="hm"), delta(content="yes"))
    assert invoke(chat, server.url, "hi").stdout == "yes\n"


# Servers that do not answer


@pytest.mark.parametrize("command", [chat, complete])
def test_no_server_is_said(command: Any) -> None:
    result = invoke(command, "http://127.0.0.1:9", "hi")
    assert result.exit_code == 1
    assert "no server is listening at http://127.0.0.1:9" in result.stderr
    assert "octavo serve" in result.stderr


@pytest.mark.parametrize("url", ["http://", "ftp://x", "http://[", "x y"])
def test_a_faulty_url_is_an_error_not_a_traceback(url: str) -> None:
    result = invoke(chat, url, "hi")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.output


def test_a_starting_server_is_waited_for(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.server.terminal.commands._POLL", 0.01)
    models = server.routes["/v1/models"]

    def starting(asked: Asked) -> Answer:
        if len(server.asked) > 2:
            server.routes["/v1/models"] = models
        return error_answer(503, "loading", "server_starting")

    server.routes["/v1/models"] = starting
    result = invoke(chat, server.url, "hi")
    assert (result.exit_code, result.stdout) == (0, "you said: hi\n")
    assert result.stderr.count("is starting") == 1


@pytest.mark.parametrize("code", ["server_draining", "engine_dead"])
def test_a_server_that_ends_is_not_waited_for(server: ScriptedServer, code: str) -> None:
    server.routes["/v1/models"] = error_answer(503, "no more", code)
    result = invoke(chat, server.url, "hi")
    assert result.exit_code == 1
    assert "no more" in result.stderr


def test_a_missing_key_is_explained(server: ScriptedServer) -> None:
    server.routes["/v1/models"] = error_answer(401, "no key", "invalid_api_key")
    assert "no key (give the server's key with --api-key)" in invoke(chat, server.url, "hi").stderr


def test_a_server_without_models_is_said(server: ScriptedServer) -> None:
    server.routes["/v1/models"] = json_answer({"data": []})
    assert "serves no model" in invoke(chat, server.url, "hi").stderr


@pytest.mark.parametrize(
    ("route", "message"),
    [
        (error_answer(400, "temperature must be in 0..2"), "temperature must be in 0..2"),
        (Answer([b""], 502), "HTTP 502"),
        (stream_answer({"error": {"message": "step failed"}}, done=False), "step failed"),
        (stream_answer(delta(content="half"), done=False), "ended too early"),
        (stream_answer(b"data: {\n\n"), "not JSON"),
        (stream_answer([1]), "no object"),
    ],
)
def test_faults_of_an_answer_are_shown(server: ScriptedServer, route: Answer, message: str) -> None:
    server.routes[CHAT] = route
    result = invoke(chat, server.url, "hi")
    assert result.exit_code == 1
    assert message in result.stderr


def test_text_that_is_no_unicode_is_an_error(server: ScriptedServer) -> None:
    with Client(server.url) as client, pytest.raises(ClientError, match="cannot be sent"):
        next(client.chat([user("\ud800")], {}))


# Conversations


def test_the_conversation_is_sent_each_time(server: ScriptedServer) -> None:
    first, second = converse(server, "one", "two")
    assert first == [user("one")]
    assert second == [user("one"), assistant("you said: one"), user("two")]


def test_clear_forgets_all_but_the_system_message(server: ScriptedServer) -> None:
    requests = converse(server, "one", "/clear", "two", system="brief")
    assert requests[-1] == [{"role": "system", "content": "brief"}, user("two")]


def test_system_sets_and_removes_the_system_message(server: ScriptedServer) -> None:
    requests = converse(server, "/system be  brief", "one", "/system", "two")
    assert requests == [[{"role": "system", "content": "be  brief"}, user("one")], [user("two")]]


def test_exit_ends_and_unknown_commands_are_not_sent(server: ScriptedServer) -> None:
    assert converse(server, "/nonsense x", "/help", "/exit", "one") == []


def test_a_failed_message_is_not_kept(server: ScriptedServer) -> None:
    def once(asked: Asked) -> Answer:
        server.routes[CHAT] = echo
        return stream_answer(delta(content="half"), {"error": {"message": "failed"}}, done=False)

    server.routes[CHAT] = once
    assert converse(server, "one", "two")[-1] == [user("two")]


def test_lines_skip_empty_ones_and_end_at_end_of_file() -> None:
    typed = iter(["a", " ", KeyboardInterrupt(), "b", EOFError()])

    def read(_: str) -> str:
        value = next(typed)
        if isinstance(value, BaseException):
            raise value
        return value

    assert list(Screen().lines(read)) == ["a", "b"]


class Terminal:
    """A program on a pseudo terminal."""

    def __init__(self, *command: str) -> None:
        self._main, child = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            env={"PATH": os.defpath, "TERM": "xterm", "LANG": "C.UTF-8"},
        )
        os.close(child)
        self.seen = ""

    def type(self, line: str) -> None:
        os.write(self._main, line.encode())

    def wait_for(self, expected: str, seconds: float = 30.0) -> None:
        """Read until the expected text has come; what came before it is dropped."""
        end = time.monotonic() + seconds
        while expected not in self.seen:
            ready, _, _ = select.select([self._main], [], [], end - time.monotonic())
            assert ready, f"{expected!r} did not come; seen: {self.seen!r}"
            self.seen += os.read(self._main, 4096).decode(errors="replace")
        self.seen = self.seen.partition(expected)[2]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._main)


@pytest.fixture
def terminal(server: ScriptedServer) -> Iterator[Terminal]:
    code = "from octavo.server.terminal.commands import chat; chat()"
    program = Terminal(sys.executable, "-c", code, "--url", server.url)
    yield program
    program.close()


def test_ctrl_c_stops_the_answer_and_not_the_program(
    server: ScriptedServer, terminal: Terminal
) -> None:
    endless = [delta(content="on and on"), *[0.02, delta(content=" and on")] * 500]
    server.routes[CHAT] = stream_answer(*endless)
    terminal.wait_for("first at http")
    terminal.wait_for(">>> ")
    terminal.type("talk\n")
    terminal.wait_for("on and on and on")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("(stopped)")
    server.routes[CHAT] = echo
    terminal.wait_for(">>> ")
    terminal.type("again\n")
    terminal.wait_for("you said: again")
    terminal.wait_for(">>> ")
    terminal.type("\x04")
    assert terminal.process.wait(10) == 0
    history = server.bodies(CHAT)[-1]["messages"]
    assert [message["role"] for message in history] == ["user", "assistant", "user"]
    assert history[1]["content"].startswith("on and on and on")
    # The server finds out when it writes the next part.
    assert server.disconnected.wait(10)


def test_an_answer_cannot_steer_the_terminal(server: ScriptedServer, terminal: Terminal) -> None:
    server.routes[CHAT] = stream_answer(delta(content="a\x1b]0;title\x07b\u009bc"))
    terminal.wait_for(">>> ")
    terminal.type("go\n")
    terminal.wait_for("a]0;titlebc")
