"""Deltas that wait to be handed out, and when a text ends."""

from octavo.engine.core.errors import InvalidRequestError
from octavo.engine.core.limits import EngineLimits
from octavo.engine.core.model_output import NOTHING_LEFT, TokenLogprobs
from octavo.engine.core.pooling import Embedding
from octavo.engine.core.request import FinishReason, Request
from octavo.engine.core.request_output import SequenceDelta
from octavo.engine.core.sampling_params import SamplingParams

# Looking up a member of an enum costs more than the rest of the test in which these stand.
_STOP, _LENGTH = FinishReason.STOP, FinishReason.LENGTH


class EndRules:
    """EOS, stop ids and lengths; stop strings are decided where text is made."""

    def __init__(self, limits: EngineLimits) -> None:
        self._eos_token_ids = frozenset(limits.eos_token_ids)
        self._max_model_len = limits.max_model_len

    def num_candidates(self, params: SamplingParams) -> int:
        """How many continuations a beam search looks at in a step."""
        return params.num_beam_candidates(self._eos_token_ids)

    def end_of_text(
        self, params: SamplingParams, token_id: int, num_prompt_tokens: int, num_tokens: int
    ) -> tuple[FinishReason | None, int | None]:
        """The reason to end after `token_id`, if any, and the client's stop id that matched.

        `num_tokens` counts prompt and output, `token_id` included.
        """
        num_output_tokens = num_tokens - num_prompt_tokens
        # The sampler masks end tokens up to min_tokens; one that comes by then ends nothing.
        if num_output_tokens > params.min_tokens:
            if token_id in params.stop_token_ids:
                return _STOP, token_id
            if token_id in self._eos_token_ids and not params.ignore_eos:
                return _STOP, None
        if num_output_tokens >= params.max_tokens or num_tokens >= self._max_model_len:
            return _LENGTH, None
        return None, None


class Outbox:
    """Deltas since the last step, and the scores of prompts that are still being computed."""

    def __init__(self) -> None:
        self.deltas: list[SequenceDelta] = []
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        # Requests that have begun to run since the last `take_started`.
        self._started: list[Request] = []

    def note_start(self, request: Request) -> None:
        """A request runs for the first time."""
        self._started.append(request)

    def take_started(self) -> list[Request]:
        """The requests that have begun to run since the last call."""
        started, self._started = self._started, []
        return started

    def take_deltas(self) -> list[SequenceDelta]:
        """All deltas since the last call."""
        deltas, self.deltas = self.deltas, []
        return deltas

    def take_prompt_logprobs(self, seq_id: int) -> tuple[TokenLogprobs, ...] | None:
        """The scores of a whole prompt, once; None where nobody asked for them."""
        scored = self.prompt_logprobs.pop(seq_id, None)
        return None if scored is None else tuple(scored)

    def put_end(
        self,
        request: Request,
        index: int,
        reason: FinishReason,
        *,
        num_cached_tokens: int = 0,
        error: str | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
        embedding: Embedding | None = None,
    ) -> None:
        """Hand out the terminal delta of a choice that ends without a new id."""
        self.deltas.append(
            SequenceDelta(
                request_id=request.request_id,
                index=index,
                token_ids=(),
                prompt_logprobs=prompt_logprobs,
                finish_reason=reason,
                error=error,
                num_cached_tokens=num_cached_tokens,
                scheduled_time=request.scheduled_time,
                embedding=embedding,
                refusal=InvalidRequestError(error) if error == NOTHING_LEFT else None,
            )
        )
