"""One request between the engine's steps and whoever reads its answer."""

import asyncio
import time
from dataclasses import dataclass, field

from octavo.engine.core.errors import OctavoError
from octavo.engine.core.request import FinishReason
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.output_processor import ChoiceOutput, merge_outputs
from octavo.server.context import RequestContext
from octavo.server.metrics import RequestSummary, RequestTimes


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt. `request_id` must be unique among the unfinished ones."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


@dataclass(slots=True)
class EngineStream:
    """What one request has waiting, and its figures for the metrics.

    Its reader is woken once `interval` tokens of a choice wait, and for the first and the last of
    each choice at once.
    """

    request: GenerateRequest
    context: RequestContext
    arrival: float
    own_limit: float | None = None
    interval: int = 1
    outputs: list[ChoiceOutput] = field(default_factory=list)
    error: OctavoError | None = None
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)
    open_choices: int = 0
    reason: FinishReason = FinishReason.ABORT
    scheduled: float | None = None
    last_tokens: dict[int, float] = field(default_factory=dict)
    first_token: float | None = None
    output_tokens: dict[int, int] = field(default_factory=dict)
    prefilled: bool = False
    timer: asyncio.TimerHandle | None = None
    _taken: dict[int, int] = field(default_factory=dict)

    @property
    def stage(self) -> str:
        """Label for metrics: queue until the first step, then run."""
        return "queue" if self.scheduled is None else "run"

    def fail(self, error: OctavoError) -> None:
        """End the stream with an error, unless it has already ended."""
        if self.error is None and self.open_choices > 0:
            self.error = error
            self.wakeup.set()

    def put(self, outputs: list[ChoiceOutput]) -> None:
        """Add what is new."""
        self.outputs.extend(outputs)
        if self.interval == 1 or any(map(self._is_due, outputs)):
            self.wakeup.set()

    async def next(self) -> list[ChoiceOutput]:
        """Wait until outputs are due; what is waiting comes before the error."""
        if self.error is None:
            await self.wakeup.wait()
        self.wakeup.clear()
        if not self.outputs:
            assert self.error is not None
            raise self.error
        outputs, self.outputs = self.outputs, []
        if self.interval > 1:
            self._taken |= {output.index: output.num_output_tokens for output in outputs}
        return merge_outputs(outputs)

    def _is_due(self, output: ChoiceOutput) -> bool:
        taken = self._taken.get(output.index)
        if taken is None or output.finish_reason is not None:
            return True
        return output.num_output_tokens - taken >= self.interval

    def summary(self) -> RequestSummary:
        """Return the figures of a request that ends now."""
        reason = self.reason if self.open_choices == 0 else FinishReason.ABORT
        if self.error is not None:
            reason = FinishReason.ERROR
        return RequestSummary(
            reason=reason,
            times=RequestTimes(
                arrival=self.arrival,
                scheduled=self.scheduled,
                first_token=self.first_token,
                last_token=max(self.last_tokens.values(), default=None),
                end=time.monotonic(),
            ),
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_output_tokens=sum(self.output_tokens.values()),
            longest_output=max(self.output_tokens.values(), default=0),
            max_tokens=self.request.params.max_tokens,
            n=self.request.params.n,
        )
