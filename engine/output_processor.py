"""From the engine's token deltas to text: what a request's stream of outputs is made of.

Runs on the event loop thread; it holds the text state of every unfinished choice. Stop strings are
decided here, so the engine is asked to abort a choice whose text has ended.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from octavo.engine.core.errors import OctavoError, RequestFailedError
from octavo.engine.core.model_output import TokenLogprobs
from octavo.engine.core.pooling import Embedding
from octavo.engine.core.request import FinishReason
from octavo.engine.core.request_output import SequenceDelta
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.detokenizer import Detokenizer
from octavo.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenAlternative:
    """One candidate at a position. `token_bytes` is None for tokens that stand for no bytes."""

    token_id: int
    text: str
    token_bytes: bytes | None
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The token at a position with its raw log-probability, and the best alternatives.

    `rank` is 1 for the most likely token. `text` is that of the token alone. `text_offset` is the
    number of characters of the choice's own text before this token; 0 for prompt tokens.
    """

    token_id: int
    text: str
    token_bytes: bytes | None
    logprob: float
    rank: int
    top: tuple[TokenAlternative, ...]
    text_offset: int = 0


@dataclass(frozen=True, slots=True)
class PromptRecords:
    """The records of a prompt, made anew each time they are read: thousands take seconds.

    May be read in any thread.
    """

    entries: Sequence[TokenLogprobs]
    tokenizer: Tokenizer

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[TokenRecord]:
        return (_record(entry, self.tokenizer, 0) for entry in self.entries)


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """What is new for one choice since its last output.

    `finish_reason` is set on the choice's last output only. `stop_reason` is the client's stop
    string or stop id that ended it. `logprobs` has one record per id of `token_ids` where asked
    for. The counts are running totals: `num_output_tokens` of this choice, the other two of the
    request. `prompt_logprobs` comes once, with the first output of choice 0: one record for each
    prompt token but the first. `embedding` comes with the last output where asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenRecord, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    prompt_logprobs: PromptRecords | None = None
    embedding: Embedding | None = None


@dataclass(slots=True)
class ProcessedOutputs:
    """Results of one batch of deltas, by request id.

    `aborts` lists (request id, choice) whose text ended by a stop string while the engine still
    generates. A request in `errors` has failed as a whole; nothing follows for it.
    """

    outputs: dict[str, list[ChoiceOutput]] = field(default_factory=dict)
    aborts: list[tuple[str, int]] = field(default_factory=list)
    errors: dict[str, OctavoError] = field(default_factory=dict)


@dataclass(slots=True)
class _Choice:
    detokenizer: Detokenizer
    num_output_tokens: int = 0
    num_chars: int = 0


@dataclass(slots=True)
class _Request:
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    choices: dict[int, _Choice] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    num_cached_tokens: int = 0


def merge_outputs(outputs: Sequence[ChoiceOutput]) -> list[ChoiceOutput]:
    """Join outputs of the same choice into one each, for a reader that fell behind."""
    by_index: dict[int, list[ChoiceOutput]] = {}
    for output in outputs:
        by_index.setdefault(output.index, []).append(output)
    return [parts[0] if len(parts) == 1 else _join(parts) for parts in by_index.values()]


def _join(parts: Sequence[ChoiceOutput]) -> ChoiceOutput:
    # Everything that is not a delta is a running total or set once, on the last part; only the
    # prompt's records come with the first.
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        logprobs=tuple(record for part in parts for record in part.logprobs),
        prompt_logprobs=parts[0].prompt_logprobs,
    )


class OutputProcessor:
    """Text state of all unfinished requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}

    def add(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Begin a request."""
        assert request_id not in self._requests, request_id
        self._requests[request_id] = _Request(prompt_token_ids, params)

    def remove(self, request_id: str) -> None:
        """Forget a request; deltas that still arrive for it are dropped."""
        self._requests.pop(request_id, None)

    def process(self, deltas: Iterable[SequenceDelta]) -> ProcessedOutputs:
        """Turn deltas into outputs, in order."""
        result = ProcessedOutputs()
        for delta in deltas:
            request = self._requests.get(delta.request_id)
            if request is None or delta.index in request.finished:
                continue
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                message = delta.error or "The request was aborted"
                result.errors[delta.request_id] = delta.refusal or RequestFailedError(message)
                self.remove(delta.request_id)
                continue
            try:
                output = self._process_delta(request, delta)
            except Exception:
                # A fault in one request's text must not take the others with it.
                logger.exception("Request %s failed while its text was made", delta.request_id)
                result.errors[delta.request_id] = RequestFailedError(
                    "The text of the request could not be made"
                )
                self.remove(delta.request_id)
                continue
            result.outputs.setdefault(delta.request_id, []).append(output)
            if output.finish_reason is None:
                continue
            if delta.finish_reason is None:
                result.aborts.append((delta.request_id, delta.index))
            self._finish_choice(delta.request_id, request, delta.index)
        return result

    def _finish_choice(self, request_id: str, request: _Request, index: int) -> None:
        request.finished.add(index)
        del request.choices[index]
        if len(request.finished) == request.params.num_sequences:
            self.remove(request_id)

    def _process_delta(self, request: _Request, delta: SequenceDelta) -> ChoiceOutput:
        params = request.params
        choice = request.choices.get(delta.index)
        if choice is None:
            choice = _Choice(Detokenizer(self._tokenizer, request.prompt_token_ids, params))
            request.choices[delta.index] = choice
        request.num_cached_tokens = max(request.num_cached_tokens, delta.num_cached_tokens)

        ended_by_token = delta.finish_reason is FinishReason.STOP
        visible = delta.token_ids
        if ended_by_token and not params.include_stop_str_in_output:
            visible = visible[:-1]
        detokenized = choice.detokenizer.append(visible, last=delta.finish_reason is not None)

        token_ids = delta.token_ids
        finish_reason = delta.finish_reason
        stop_reason: str | int | None = delta.stop_reason
        if detokenized.stop is not None:
            token_ids = token_ids[: detokenized.num_tokens_used]
            finish_reason, stop_reason = FinishReason.STOP, detokenized.stop
        choice.num_output_tokens += len(token_ids)
        return ChoiceOutput(
            index=delta.index,
            text=detokenized.text,
            token_ids=token_ids,
            logprobs=self._records(choice, delta.logprobs[: len(token_ids)], detokenized.pieces),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=choice.num_output_tokens,
            prompt_logprobs=self._prompt_records(delta.prompt_logprobs),
            embedding=delta.embedding,
        )

    def _records(
        self, choice: _Choice, logprobs: Sequence[TokenLogprobs], pieces: Sequence[str]
    ) -> tuple[TokenRecord, ...]:
        records = []
        for position, entry in enumerate(logprobs):
            records.append(_record(entry, self._tokenizer, choice.num_chars))
            # The token that ends a text has no piece of it.
            choice.num_chars += len(pieces[position]) if position < len(pieces) else 0
        return tuple(records)

    def _prompt_records(self, logprobs: Sequence[TokenLogprobs] | None) -> PromptRecords | None:
        return None if logprobs is None else PromptRecords(logprobs, self._tokenizer)


def _record(entry: TokenLogprobs, tokenizer: Tokenizer, text_offset: int) -> TokenRecord:
    return TokenRecord(
        token_id=entry.token_id,
        text=tokenizer.token_text(entry.token_id),
        token_bytes=tokenizer.token_bytes(entry.token_id),
        logprob=entry.logprob,
        rank=entry.rank,
        top=tuple(
            TokenAlternative(
                token_id=token_id,
                text=tokenizer.token_text(token_id),
                token_bytes=tokenizer.token_bytes(token_id),
                logprob=logprob,
            )
            for token_id, logprob in entry.top
        ),
        text_offset=text_offset,
    )
