"""The command, the starter model and a client that is not ours: what a newcomer sees."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

START_S = 170
README = Path(__file__).parents[2] / "README.md"
OCTAVO = Path(sys.executable).with_name("octavo")


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [OCTAVO, "serve", "--port", str(port), "--kv-cache-memory-bytes", "200000000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_ready(url, process)
            yield url
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=30)
            assert process.returncode == 0, log
            assert "Traceback" not in log
        finally:
            process.kill()


def wait_until_ready(url: str, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        try:
            with urllib.request.urlopen(f"{url}/health"):
                return
        except urllib.error.HTTPError as error:
            error.close()
        except urllib.error.URLError:
            pass
        time.sleep(0.2)
    pytest.fail("the server is not ready")


@pytest.mark.timeout(START_S + 60)
def test_the_starter_model_answers_curl(server_url: str) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    command = ["curl", "-s", f"{server_url}/v1/chat/completions", "-d", json.dumps(body)]
    command += ["-H", "Content-Type: application/json"]
    answer = subprocess.run(command, capture_output=True, check=True)
    (choice,) = json.loads(answer.stdout)["choices"]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.timeout(START_S + 60)
def test_openai_python_streams_what_it_gets_at_once(server_url: str) -> None:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="none") as client:
        request = {
            "model": client.models.list().data[0].id,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 32,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**request)
        with client.chat.completions.create(**request, stream=True) as stream:
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert streamed == whole.choices[0].message.content
    assert f"```\n{streamed}\n```" in README.read_text(encoding="utf-8")
