"""What the heavy clients do with a running server; started by `check` in this folder."""

import json
import logging
import os
import random
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

BASE_URL, WORK = sys.argv[1], Path(sys.argv[2])
API, MODEL = f"{BASE_URL}/v1", "tiny"
QUESTION = [{"role": "user", "content": "hello world"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


def expected_answer() -> str:
    """The greedy answer, by the client that the API is made for."""
    import openai  # noqa: PLC0415 - each check brings its own client

    with openai.OpenAI(base_url=API, api_key="none") as client:
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, **GREEDY)
    return answer.choices[0].message.content or ""


def check_litellm() -> None:
    import litellm  # noqa: PLC0415

    target = {"model": f"openai/{MODEL}", "api_base": API, "api_key": "none", "max_retries": 0}
    answer = litellm.completion(messages=QUESTION, **target, **GREEDY)
    assert answer.choices[0].message.content == EXPECTED
    assert answer.usage.completion_tokens == 8
    chunks = list(litellm.completion(messages=QUESTION, stream=True, **target, **GREEDY))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == EXPECTED
    target["model"] = f"text-completion-openai/{MODEL}"
    text = litellm.text_completion(prompt="hello", **target, **GREEDY)
    assert text.choices[0].text
    target["model"] = "openai/nope"
    try:
        litellm.completion(messages=QUESTION, **target)
    except litellm.NotFoundError as error:
        assert "nope" in str(error)
    else:
        raise AssertionError("an unknown model raised nothing")
    target["model"] = f"openai/{MODEL}"
    try:
        litellm.completion(messages=QUESTION, **target, max_tokens=10**6)
    except litellm.BadRequestError:
        pass
    else:
        raise AssertionError("a context that is too long raised nothing")


def check_langchain() -> None:
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings  # noqa: PLC0415

    chat = ChatOpenAI(base_url=API, api_key="none", model=MODEL, **GREEDY)
    answer = chat.invoke("hello world")
    assert answer.content == EXPECTED
    assert answer.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.content for chunk in chat.stream("hello world")) == EXPECTED
    assert OpenAI(base_url=API, api_key="none", model=MODEL, **GREEDY).invoke("hello")
    embeddings = OpenAIEmbeddings(
        base_url=API, api_key="none", model=MODEL, check_embedding_ctx_length=False
    )
    first, second = embeddings.embed_documents(["hello", "world"])
    assert len(first) == len(second) == 64


def check_llm_command() -> None:
    home = WORK / "llm"
    home.mkdir()
    (home / "extra-openai-models.yaml").write_text(
        f"- model_id: octavo\n  model_name: {MODEL}\n  api_base: {API}\n"
    )
    for flags in ([], ["--no-stream"]):
        command = ["llm", "-m", "octavo", "-o", "temperature", "0", "-o", "max_tokens", "8"]
        run = subprocess.run(
            [*command, *flags, QUESTION[0]["content"]],
            # Plugins of the environment, such as the one that carries the starter model, need more.
            env=os.environ
            | {"LLM_USER_PATH": str(home), "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": "none"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip() == EXPECTED.strip(), run.stdout


TASK = """
task: octavo_tiny
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
WORDS = [
    "hello",
    "world",
    "the",
    "and",
    "capital",
    "of",
    "France",
    "is",
    "Paris",
    "Warsaw",
    "What",
    "Answer",
    "you",
    "are",
    "it",
]


def check_lm_eval() -> None:
    """Log-likelihoods of a task made here equal those that transformers computes."""
    folder = WORK / "lm_eval"
    folder.mkdir()
    generator = random.Random(3)
    documents = [
        {
            "question": " ".join(generator.choices(WORDS, k=6)),
            "choices": [" ".join(generator.choices(WORDS, k=k + 1)) for k in range(4)],
            "answer": generator.randrange(4),
        }
        for _ in range(24)
    ]
    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, documents)))
    (folder / "task.yaml").write_text(TASK.format(data=data))
    tokenizer = WORK / "model"
    served = run_lm_eval(
        folder,
        "local-completions",
        f"model={MODEL},base_url={API}/completions,tokenizer={tokenizer},num_concurrent=4,"
        "max_length=512",
    )
    local = run_lm_eval(folder, "hf", f"pretrained={tokenizer},dtype=float32")
    for name in ("acc,none", "acc_norm,none"):
        assert served[0][name] == local[0][name], (name, served[0], local[0])
    assert len(served[1]) == len(local[1]) == 24 * 4
    worst = max(abs(a - b) for a, b in zip(served[1], local[1], strict=True))
    say(f"      accuracy {served[0]['acc,none']:.3f} on both, log-likelihoods within {worst:.1e}")
    assert worst < 1e-3


def run_lm_eval(folder: Path, model: str, arguments: str) -> tuple[dict[str, Any], list[float]]:
    """Scores of the task, and the log-likelihood of each choice."""
    output = folder / model
    run = subprocess.run(
        [
            *("lm_eval", "run", "--model", model, "--model_args", arguments),
            *("--tasks", "octavo_tiny", "--include_path", str(folder), "--batch_size", "1"),
            *("--output_path", str(output), "--log_samples"),
        ],
        env=os.environ
        | {"HF_HOME": str(WORK / "hf"), "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    (results,) = output.rglob("results_*.json")
    (samples,) = output.rglob("samples_*.jsonl")
    lines = map(json.loads, samples.read_text().splitlines())
    ordered = sorted(lines, key=lambda line: line["doc_id"])
    values = [float(choice[0]) for line in ordered for choice in line["filtered_resps"]]
    return json.loads(results.read_text())["results"]["octavo_tiny"], values


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


CHECKS: dict[str, Callable[[], None]] = {
    "litellm": check_litellm,
    "langchain": check_langchain,
    "llm": check_llm_command,
    "lm_eval": check_lm_eval,
}
EXPECTED = expected_answer()

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    failed = 0
    for name, check in CHECKS.items():
        try:
            check()
        except Exception:
            failed += 1
            say(f"FAIL  {name}\n{traceback.format_exc()}")
        else:
            say(f"pass  {name}")
    sys.exit(failed)
