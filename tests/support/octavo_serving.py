"""An application over the real engine whose model is a table: fast, exact, and able to fail."""

import asyncio
import contextlib
import functools
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI
from octavo_fixtures import EOS_ID, IM_END_ID

from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.engine.core.limits import EngineLimits
from octavo.engine.core.model_output import ModelOutput, TokenLogprobs
from octavo.engine.core.pooling import DEFAULT_EMBEDDING, EmbeddingSpec
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import ScheduledSequence, SchedulerOutput
from octavo.engine.engine_loop import EngineLoop
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.tokenizer import Tokenizer
from octavo.server.app import create_app
from octavo.server.async_engine import EngineThread, OnFatal, OnStep
from octavo.server.chat_template import ChatTemplate
from octavo.server.loaded_engine import LoadedEngine, Loader, Report
from octavo.server.serve import make_uvicorn_config
from octavo.server.served_model import ServedModel

BLOCK_SIZE = 16


@functools.cache
def load_tokenizer(directory: Path) -> Tokenizer:
    """Load a tokenizer once per run; it is never changed."""
    return Tokenizer.from_directory(directory)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Float64 log-softmax of one row; minus infinity stays."""
    row = logits.astype(np.float64)
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


@dataclass
class _Row:
    token_ids: list[int]
    num_prompt: int
    num_computed: int
    index: int
    seed: int
    params: SamplingParams


class TableExecutor:
    """Row t of `table` [V, V] holds the logits after token t.

    `before_step` is called with the number of steps run so far; it may wait or raise. `fail_row`
    gets the generated ids of a sequence and says whether its row comes out unusable.
    """

    def __init__(self, table: np.ndarray, num_blocks: int) -> None:
        self.table = table
        self.num_blocks = num_blocks
        self.before_step: Callable[[int], None] = lambda step: None
        self.fail_row: Callable[[Sequence[int]], bool] = lambda output: False
        self._rows: dict[int, _Row] = {}
        self._num_steps = 0

    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        """Run one step."""
        self.before_step(self._num_steps)
        self._num_steps += 1
        for seq_id in plan.removed_seq_ids:
            self._rows.pop(seq_id, None)
        for new in plan.new_sequences:
            self._rows[new.seq_id] = _Row(
                token_ids=list(new.token_ids),
                num_prompt=new.num_prompt_tokens,
                num_computed=new.num_computed_tokens,
                index=new.index,
                seed=new.seed,
                params=new.params,
            )
        output = ModelOutput({}, {}, {}, {}, {})
        for item in plan.scheduled:
            self._run(item, output)
        return output

    def shutdown(self) -> None:
        """Nothing is held."""

    def _run(self, item: ScheduledSequence, output: Any) -> None:
        row = self._rows[item.seq_id]
        start, row.num_computed = row.num_computed, row.num_computed + item.num_tokens
        num_top = row.params.prompt_logprobs
        if num_top is not None:
            scored = range(start + 1, min(row.num_computed + 1, row.num_prompt))
            output.prompt_logprobs[item.seq_id] = tuple(
                self._logprobs(row.token_ids[place - 1], row.token_ids[place], num_top)
                for place in scored
            )
        if not item.sample:
            return
        if row.params.pooling is not None:
            vector = self.table[row.token_ids[-1]]
            output.embeddings[item.seq_id] = vector / np.linalg.norm(vector)
            return
        if self.fail_row(row.token_ids[row.num_prompt :]):
            output.failed[item.seq_id] = "the row holds NaN"
            return
        last = row.token_ids[-1]
        # All of them draw from the same row, before the sequence grows.
        for fork in item.forks:
            self._put(output, fork.seq_id, last, self._draw(row, fork.index), row.params)
        drawn = self._draw(row, row.index)
        row.token_ids.append(drawn)
        self._put(output, item.seq_id, last, drawn, row.params)

    def _put(self, output: Any, seq_id: int, last: int, drawn: int, params: SamplingParams) -> None:
        output.sampled[seq_id] = (drawn,)
        if params.logprobs is not None:
            output.logprobs[seq_id] = (self._logprobs(last, drawn, params.logprobs),)

    def _draw(self, row: _Row, index: int) -> int:
        params = row.params
        logits = self.table[row.token_ids[-1]].astype(np.float64)
        for token_id, bias in params.logit_bias.items():
            logits[token_id] += bias
        if params.allowed_token_ids is not None:
            allowed = np.full_like(logits, -np.inf)
            allowed[list(params.allowed_token_ids)] = logits[list(params.allowed_token_ids)]
            logits = allowed
        if params.greedy:
            return int(logits.argmax())
        position = len(row.token_ids) - row.num_prompt
        generator = np.random.default_rng([row.seed % 2**63, index, position])
        return int(
            (log_softmax(logits / params.temperature) + generator.gumbel(size=len(logits))).argmax()
        )

    def _logprobs(self, last: int, token_id: int, num_top: int) -> TokenLogprobs:
        values = log_softmax(self.table[last])
        best = np.argsort(-values, kind="stable")[:num_top]
        return TokenLogprobs(
            token_id=token_id,
            logprob=float(values[token_id]),
            rank=int((values > values[token_id]).sum()) + 1,
            top=tuple((int(place), float(values[place])) for place in best),
        )


@dataclass
class ServedTable:
    """The application, what is behind it, and a client."""

    app: FastAPI
    executor: TableExecutor
    model: ServedModel
    client: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        """Send a JSON body of these fields."""
        return await self.client.post(path, json=body)

    async def post_raw(self, path: str, raw: bytes) -> httpx.Response:
        """Send bytes that claim to be JSON."""
        headers = {"content-type": "application/json"}
        return await self.client.post(path, content=raw, headers=headers)

    async def is_alive(self) -> bool:
        """True when the canary is answered and nothing is left over."""
        response = await self.post("/v1/completions", prompt="canary", max_tokens=2, temperature=0)
        state = self.app.state.octavo
        for _ in range(100):
            stats = state.serving.engine.stats()
            if not (stats.num_running or stats.num_waiting or state.serving.admission.num_accepted):
                break
            await asyncio.sleep(0.01)
        else:
            return False
        return response.status_code == 200 and stats.num_used_blocks == 0


@dataclass
class TableSettings:
    """What a test may choose. `tokenizer_dir` holds a tokenizer of the fixtures."""

    tokenizer_dir: Path
    table: np.ndarray
    num_blocks: int = 64
    max_model_len: int = 512
    max_num_seqs: int = 16
    defaults: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    embedding: EmbeddingSpec = DEFAULT_EMBEDDING
    generates: bool = True
    engine: EngineConfig = field(default_factory=EngineConfig)
    executors: list[TableExecutor] = field(default_factory=list)
    models: list[ServedModel] = field(default_factory=list)

    def loader(self) -> Loader:
        """Return what the application loads its engine with."""

        def load(
            server_config: ServerConfig, engine_config: EngineConfig, report: Report
        ) -> LoadedEngine:
            executor = TableExecutor(self.table, self.num_blocks)
            self.executors.append(executor)
            limits = EngineLimits(
                max_model_len=self.max_model_len,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=2048,
                num_blocks=self.num_blocks,
                block_size=BLOCK_SIZE,
                vocab_size=len(self.table),
                eos_token_ids=(EOS_ID, IM_END_ID),
            )
            engine = LLMEngine(engine_config, limits, executor)
            tokenizer = load_tokenizer(self.tokenizer_dir)
            model = ServedModel(
                names=("M", "org/alias"),
                root="table",
                created=int(time.time()),
                max_model_len=self.max_model_len,
                vocab_size=len(self.table),
                tokenizer=tokenizer,
                chat_template=ChatTemplate(tokenizer.chat_template, tokenizer),
                default_sampling_params=self.defaults,
                embedding=self.embedding,
                generates=self.generates,
            )
            self.models.append(model)

            def make_thread(on_step: OnStep, on_fatal: OnFatal) -> EngineThread:
                return EngineLoop(engine, on_step, on_fatal)

            return LoadedEngine(model, limits, make_thread)

        return load

    def app(self) -> FastAPI:
        """Make the application; its lifespan starts the engine."""
        config = ServerConfig(disable_log_stats=True, **self.server)
        return create_app(config, self.engine, load=self.loader())


@contextlib.asynccontextmanager
async def served(settings: TableSettings) -> AsyncIterator[ServedTable]:
    """Run the application in this event loop."""
    app = settings.app()
    async with app.router.lifespan_context(app):
        await app.state.octavo.lifecycle.wait_until_started()
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            yield ServedTable(app, settings.executors[0], settings.models[0], client)


@contextlib.contextmanager
def served_on_socket(settings: TableSettings) -> Iterator[str]:
    """Run the application under uvicorn in a thread; gives its address."""
    app = settings.app()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(make_uvicorn_config(app, ServerConfig()))
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve([listener])), name="uvicorn"
        )
        thread.start()
        try:
            base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            _wait_until_ready(base_url)
            yield base_url
        finally:
            server.should_exit = True
            thread.join(10)


def _wait_until_ready(base_url: str) -> None:
    with httpx.Client() as client:
        for _ in range(6000):
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{base_url}/health").status_code == 200:
                    return
            time.sleep(0.02)
    raise TimeoutError("the server did not become ready")


def sse_events(raw: bytes) -> list[str]:
    """Return the data of each event; asserts the form of the stream."""
    text = raw.decode()
    assert text.endswith("\n\n")
    assert "\r" not in text
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if lines:
            (line,) = lines
            assert line.startswith("data: ")
            events.append(line.removeprefix("data: "))
    return events
