"""All outputs of one HTTP request, whose prompts run in the engine side by side."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.engine.core.request import FinishReason
from octavo.engine.output_processor import ChoiceOutput, PromptRecords, TokenRecord
from octavo.server.async_engine import AsyncEngine
from octavo.server.engine_stream import GenerateRequest
from octavo.server.usage import UsageCounter

_QUEUE_SIZE = 1
"""Small, so that the tokens of a slow reader wait in the engine's stream, which joins them."""


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


class OutputStream:
    """Outputs of several prompts in the order in which they come.

    Made on the event loop, where generating begins at once. `aclose` aborts what is unfinished.
    """

    def __init__(self, engine: AsyncEngine, requests: Sequence[GenerateRequest]) -> None:
        self._engine = engine
        self._queue: asyncio.Queue[tuple[int, list[ChoiceOutput] | _End]] = asyncio.Queue(
            _QUEUE_SIZE
        )
        self._num_open = len(requests)
        self._pumps = [
            asyncio.create_task(self._pump(number, request))
            for number, request in enumerate(requests)
        ]

    async def next(self) -> tuple[int, list[ChoiceOutput]] | None:
        """Return a prompt's number and its new outputs; None when all have ended.

        The outputs are empty after `interrupt`. Raises what the engine raises for any prompt.
        """
        while self._num_open > 0:
            number, item = await self._queue.get()
            if not isinstance(item, _End):
                return number, item
            if item.error is not None:
                raise item.error
            self._num_open -= 1
        return None

    def interrupt(self) -> None:
        """Make a `next` that waits return without outputs."""
        if self._queue.empty():
            self._queue.put_nowait((0, []))

    async def aclose(self) -> None:
        """Abort what is unfinished and wait until the engine was told."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _pump(self, number: int, request: GenerateRequest) -> None:
        error: Exception | None = None
        try:
            async with contextlib.aclosing(self._engine.generate(request)) as batches:
                async for outputs in batches:
                    await self._queue.put((number, outputs))
        except Exception as failure:  # handed over to the reader, whatever it is
            error = failure
        await self._queue.put((number, _End(error)))


@dataclass(slots=True)
class CollectedChoice:
    """One choice with everything that came for it."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenRecord] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    def add(self, output: ChoiceOutput) -> None:
        """Append what is new."""
        self.texts.append(output.text)
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason

    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens; 0 without any."""
        return sum(record.logprob for record in self.logprobs) / max(len(self.logprobs), 1)


@dataclass(slots=True)
class CollectedPrompt:
    """One prompt with its choices in the order of their numbers."""

    choices: list[CollectedChoice]
    prompt_logprobs: PromptRecords | None = None

    def num_records(self) -> int:
        """Tokens whose log-probabilities are there; an echo tells the prompt's in each choice."""
        of_prompt = len(self.prompt_logprobs or ()) * len(self.choices)
        return of_prompt + sum(len(choice.logprobs) for choice in self.choices)


async def collect(
    outputs: OutputStream, requests: Sequence[GenerateRequest], usage: UsageCounter
) -> list[CollectedPrompt]:
    """Read `outputs` to the end."""
    prompts = [
        CollectedPrompt([CollectedChoice() for _ in range(request.params.num_sequences)])
        for request in requests
    ]
    while (item := await outputs.next()) is not None:
        number, batch = item
        for output in batch:
            usage.add(number, output)
            prompts[number].choices[output.index].add(output)
            if output.prompt_logprobs is not None:
                prompts[number].prompt_logprobs = output.prompt_logprobs
    return prompts
