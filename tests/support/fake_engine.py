"""A real engine over an executor that draws from a script, for tests of the server."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.engine.core.limits import EngineLimits
from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.engine_loop import EngineLoop
from octavo.engine.executor.base import Executor
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.tokenizer import Tokenizer
from octavo.server.async_engine import EngineThread, OnFatal, OnStep
from octavo.server.chat_template import ChatTemplate
from octavo.server.loaded_engine import LoadedEngine, Loader, Report
from octavo.server.served_model import ServedModel

NUM_BLOCKS = 64
MAX_MODEL_LEN = 512


class ScriptedExecutor:
    """Emits `script` token by token for every sequence, then its last token for ever.

    `gate` must be set for a step to run; it closes after `pause_after` steps. `fail_with` is
    raised by the next step. `poison` names the sequences (by order of appearance) whose rows fail.
    """

    def __init__(self, script: Sequence[int]) -> None:
        self.num_blocks = NUM_BLOCKS
        self.script = tuple(script)
        self.gate = threading.Event()
        self.gate.set()
        self.pause_after = -1
        self.step_seconds = 0.0
        self.fail_with: Exception | None = None
        self.poison: set[int] = set()
        self.num_steps = 0
        self.stopped = False
        self._drawn: dict[int, int] = {}

    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        self.gate.wait()
        time.sleep(self.step_seconds)
        self.num_steps += 1
        if self.num_steps == self.pause_after:
            self.gate.clear()
        if self.fail_with is not None:
            raise self.fail_with
        sampled: dict[int, tuple[int, ...]] = {}
        failed: dict[int, str] = {}
        for item in plan.scheduled:
            if not item.sample:
                continue
            for seq_id in (item.seq_id, *(fork.seq_id for fork in item.forks)):
                if seq_id in self.poison:
                    failed[seq_id] = "the logits are not finite"
                else:
                    sampled[seq_id] = (self._next(seq_id),)
        return ModelOutput(sampled=sampled, failed=failed)

    def shutdown(self) -> None:
        self.stopped = True

    def _next(self, seq_id: int) -> int:
        place = self._drawn.get(seq_id, 0)
        self._drawn[seq_id] = place + 1
        return self.script[min(place, len(self.script) - 1)]


def fake_loader(
    tokenizer_dir: Path,
    executor: Executor,
    *,
    max_num_seqs: int = 8,
    before: Callable[[], None] = lambda: None,
) -> Loader:
    """Return what `create_app` loads its engine by; `before` runs in the loader's thread."""

    def load(
        server_config: ServerConfig, engine_config: EngineConfig, report: Report
    ) -> LoadedEngine:
        report("reading tea leaves")
        before()
        tokenizer = Tokenizer.from_directory(tokenizer_dir)
        limits = EngineLimits(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
            num_blocks=NUM_BLOCKS,
            block_size=16,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,),
        )
        engine = LLMEngine(engine_config, limits, executor)

        def make_thread(on_step: OnStep, on_fatal: OnFatal) -> EngineThread:
            return EngineLoop(engine, on_step, on_fatal)

        model = ServedModel(
            names=server_config.served_model_name or ("fake",),
            root="fake",
            created=1,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            tokenizer=tokenizer,
            chat_template=ChatTemplate(tokenizer.chat_template, tokenizer),
            default_sampling_params={},
        )
        return LoadedEngine(model, limits, make_thread)

    return load
