"""The engine as plain calls: requests in, one step at a time, deltas out."""

import random
from typing import TYPE_CHECKING

from octavo.config.engine import EngineConfig
from octavo.engine.cache.kv_cache_manager import KVCacheManager
from octavo.engine.cache.prefix_hash import hash_function_for
from octavo.engine.core.block_map import BlockMap
from octavo.engine.core.errors import ContextLengthError, InvalidRequestError
from octavo.engine.core.limits import EngineLimits
from octavo.engine.core.messages import AddRequest
from octavo.engine.core.model_output import Launch, Wait
from octavo.engine.core.request import Request
from octavo.engine.core.request_output import EngineStats, SequenceDelta
from octavo.engine.executor.base import Executor
from octavo.engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from octavo.engine.core.scheduler_output import SchedulerOutput

__all__ = ["EngineLimits", "LLMEngine"]


class LLMEngine:
    """Puts scheduler, cache and executor together. Synchronous; one thread at a time.

    `launch` is given where the executor can start a step without waiting for its results, for
    which the call that it returns then waits. Steps are carried out in the order of their launch.
    The next step is then planned and launched while one runs.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: EngineLimits,
        executor: Executor,
        launch: Launch | None = None,
    ) -> None:
        self.limits = limits
        self._executor = executor
        self._launch = launch
        self._running: tuple[SchedulerOutput, Wait] | None = None
        self._kv_cache = KVCacheManager(
            limits.num_blocks,
            limits.block_size,
            config.cache.enable_prefix_caching,
            hash_function_for(config.cache.kv_cache_dtype),
            host_memory=limits.host_memory,
            window=limits.window,
        )
        self._scheduler = Scheduler(config.scheduler, limits, self._kv_cache)
        # With a configured seed the n-th request without its own draws the same number each run.
        seed = config.load.seed
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        self._shut_down = False

    def add_request(self, request: AddRequest) -> None:
        """Queue a request. Raises RequestError for one that could never be served."""
        self._check(request)
        seed = request.params.seed
        queued = Request(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            params=request.params,
            seed=self._seeds.getrandbits(63) if seed is None else seed,
            arrival_time=request.arrival_time,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        self._scheduler.add_request(queued)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request or one choice of it; unknown or finished ones are left alone.

        The terminal deltas come with the next step.
        """
        self._scheduler.abort(request_id, index)

    def has_work(self) -> bool:
        """True while a step would compute or hand out something."""
        return self._scheduler.has_work

    def step(self) -> list[SequenceDelta]:
        """Schedule, run the model, and return what came of it.

        When it fails, all that open requests hold is given back before the exception goes on, and
        they end with an error; those deltas come with the next step.
        """
        if not self._scheduler.has_requests:
            return self._scheduler.take_deltas()
        # Those of the step before that nobody asked for: they would pile up.
        self._scheduler.take_started()
        try:
            return self._step()
        except Exception as error:
            self._running = None
            self._scheduler.fail_all(f"a step failed: {type(error).__name__}")
            raise

    def _step(self) -> list[SequenceDelta]:
        if self._launch is not None:
            return self._step_and_launch_next(self._launch)
        plan = self._scheduler.schedule()
        output = self._executor.execute_model(plan)
        return self._scheduler.update_from_output(plan, output)

    def _step_and_launch_next(self, launch: Launch) -> list[SequenceDelta]:
        if self._running is None:
            plan = self._scheduler.schedule()
            self._running = (plan, launch(plan))
        plan, wait = self._running
        following = self._scheduler.schedule_ahead(plan)
        self._running = None if following is None else (following, launch(following))
        return self._scheduler.update_from_output(plan, wait())

    def take_starts(self, deltas: list[SequenceDelta]) -> list[SequenceDelta]:
        """Return a delta without tokens for each request that began to run in the last step.

        Left out are those that `deltas`, that step's results, tell of anyhow: only prompts of
        several chunks have nothing else to show for a long time.
        """
        started = self._scheduler.take_started()
        if not started:
            return []
        told = {delta.request_id for delta in deltas}
        return [
            SequenceDelta(request.request_id, 0, (), scheduled_time=request.scheduled_time)
            for request in started
            if request.request_id not in told
        ]

    def stats(self) -> EngineStats:
        """Counters and gauges after the last step."""
        return self._scheduler.stats()

    def block_map(self) -> BlockMap:
        """A picture of the block pool; between steps only. Takes time with the number of blocks."""
        return self._scheduler.block_map()

    def reset_prefix_cache(self) -> bool:
        """Forget all blocks kept for reuse; False, with nothing changed, while any is in use."""
        return self._kv_cache.reset_prefix_cache()

    def verify(self) -> None:
        """Count it in `stats` if the bookkeeping contradicts itself; between steps only.

        Takes time with the number of blocks.
        """
        self._scheduler.verify()

    def check_integrity(self) -> None:
        """Assert that all bookkeeping agrees; between steps only."""
        self._scheduler.check_integrity()

    def shutdown(self) -> None:
        """Release the executor; later calls do nothing."""
        if not self._shut_down:
            self._shut_down = True
            self._executor.shutdown()

    def _check(self, request: AddRequest) -> None:
        limits, prompt = self.limits, request.prompt_token_ids
        if self._scheduler.has_request(request.request_id):
            raise InvalidRequestError("a request with this id is open already", "request_id")
        if not prompt:
            raise InvalidRequestError("the prompt holds no token", "prompt")
        if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
            raise InvalidRequestError(
                f"prompt token ids must be between 0 and {limits.vocab_size - 1}", "prompt"
            )
        limits.check_beams(len(prompt), request.params)
        max_tokens = request.params.max_tokens
        if len(prompt) + max_tokens > limits.max_model_len:
            raise ContextLengthError(
                f"the context holds {limits.max_model_len} tokens, but the prompt has "
                f"{len(prompt)} and {max_tokens} more are asked for",
                "prompt",
            )
