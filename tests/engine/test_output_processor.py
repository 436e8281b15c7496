"""Deltas to text: stop strings, ends, counts, records, and one request's faults."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from octavo_fixtures import byte_ids, token_id

from octavo.engine.core.model_output import TokenLogprobs
from octavo.engine.core.request import FinishReason
from octavo.engine.core.request_output import SequenceDelta
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.output_processor import ChoiceOutput, OutputProcessor, merge_outputs
from octavo.engine.tokenizer import Tokenizer

EOS = token_id("<|eos|>")


@pytest.fixture(scope="module")
def tokenizer(byte_bpe_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(byte_bpe_dir)


def start(tokenizer: Tokenizer, **params: Any) -> OutputProcessor:
    processor = OutputProcessor(tokenizer)
    processor.add("r", byte_ids("a"), SamplingParams(max_tokens=100, **params))
    return processor


def delta(ids: Sequence[int], index: int = 0, **fields: Any) -> SequenceDelta:
    return SequenceDelta("r", index, tuple(ids), **fields)


def run(processor: OutputProcessor, *deltas: SequenceDelta) -> list[ChoiceOutput]:
    outputs: list[ChoiceOutput] = []
    for item in deltas:
        outputs.extend(processor.process([item]).outputs.get("r", []))
    return outputs


def scored(ids: Sequence[int], index: int = 0, **fields: Any) -> SequenceDelta:
    records = tuple(TokenLogprobs(id_, -1.0, 1, ((id_, -1.0), (EOS, -2.0))) for id_ in ids)
    return delta(ids, index, logprobs=records, **fields)


def test_text_is_the_tokens_decoded(tokenizer: Tokenizer) -> None:
    ids = byte_ids("hé🧡")

    outputs = run(start(tokenizer), *(delta([id_]) for id_ in ids))

    assert "".join(output.text for output in outputs) == "hé🧡"
    assert outputs[-1].num_output_tokens == len(ids)


def test_the_end_token_counts_but_has_no_text(tokenizer: Tokenizer) -> None:
    [output] = run(
        start(tokenizer, skip_special_tokens=False),
        delta([*byte_ids("hi"), EOS], finish_reason=FinishReason.STOP),
    )

    assert (output.text, output.num_output_tokens) == ("hi", 3)
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, None)


def test_the_stop_token_stays_when_asked_for(tokenizer: Tokenizer) -> None:
    stop_id = byte_ids("!")[0]
    [output] = run(
        start(tokenizer, stop_token_ids=(stop_id,), include_stop_str_in_output=True),
        delta(byte_ids("hi!"), finish_reason=FinishReason.STOP, stop_reason=stop_id),
    )

    assert (output.text, output.stop_reason) == ("hi!", stop_id)


def test_a04_stop_string_over_several_tokens_never_leaks(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer, stop=("beta gamma",))

    outputs = run(processor, *(delta([id_]) for id_ in byte_ids("alpha beta gamma")))

    assert "".join(output.text for output in outputs) == "alpha "
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason == "beta gamma"


def test_a_stop_string_aborts_the_choice_and_drops_what_follows(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer, stop=("b",))

    result = processor.process([delta(byte_ids("abc"))])
    later = processor.process([delta(byte_ids("d")), delta([], finish_reason=FinishReason.ABORT)])

    assert result.aborts == [("r", 0)]
    assert result.outputs["r"][0].text == "a"
    assert result.outputs["r"][0].num_output_tokens == 2
    assert (later.outputs, later.errors) == ({}, {})


def test_a_stop_string_in_the_last_token_needs_no_abort(tokenizer: Tokenizer) -> None:
    result = start(tokenizer, stop=("b",)).process(
        [delta(byte_ids("ab"), finish_reason=FinishReason.LENGTH)]
    )

    assert result.aborts == []
    assert result.outputs["r"][0].finish_reason is FinishReason.STOP


def test_held_text_comes_with_the_end(tokenizer: Tokenizer) -> None:
    outputs = run(
        start(tokenizer, stop=("xyz",)),
        delta(byte_ids("axy")),
        delta([], finish_reason=FinishReason.LENGTH),
    )

    assert [output.text for output in outputs] == ["a", "xy"]


def test_a_choice_that_ends_leaves_the_others_alone(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer, n=2)

    outputs = run(
        processor,
        delta(byte_ids("x"), 0, finish_reason=FinishReason.LENGTH),
        delta(byte_ids("y"), 1),
        delta(byte_ids("z"), 1, finish_reason=FinishReason.LENGTH),
    )

    assert [(output.index, output.text) for output in outputs] == [(0, "x"), (1, "y"), (1, "z")]


def test_an_error_ends_the_whole_request(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer, n=2)

    result = processor.process(
        [
            delta([], 0, finish_reason=FinishReason.ERROR, error="the logits are not finite"),
            delta(byte_ids("y"), 1),
        ]
    )

    assert {name: str(error) for name, error in result.errors.items()} == {
        "r": "the logits are not finite"
    }
    assert result.outputs == {}


def test_a_fault_while_text_is_made_stays_with_its_request(tokenizer: Tokenizer) -> None:
    class BrokenTokenizer(Tokenizer):
        def __init__(self) -> None:
            self.__dict__.update(tokenizer.__dict__)

        def token_text(self, token_id: int) -> str:
            raise ValueError("broken")

    processor = OutputProcessor(BrokenTokenizer())
    params = SamplingParams(max_tokens=5, logprobs=0)
    processor.add("r", [1], params)
    processor.add("other", [1], SamplingParams(max_tokens=5))

    result = processor.process([scored(byte_ids("a")), SequenceDelta("other", 0, (97,))])

    assert list(result.errors) == ["r"]
    assert result.outputs["other"][0].text == "a"


def test_records_carry_their_own_text_bytes_and_offset(tokenizer: Tokenizer) -> None:
    ids = [*byte_ids("aé"), EOS]

    [output] = run(start(tokenizer, logprobs=2), scored(ids, finish_reason=FinishReason.STOP))

    assert [record.token_bytes for record in output.logprobs[:3]] == [b"a", b"\xc3", b"\xa9"]
    assert [record.text_offset for record in output.logprobs] == [0, 1, 1, 2]
    assert output.logprobs[0].top[1].text == "<|eos|>"


def test_records_end_with_the_token_that_completes_the_stop(tokenizer: Tokenizer) -> None:
    [output] = run(start(tokenizer, logprobs=0, stop=("b",)), scored(byte_ids("abc")))

    assert [record.text for record in output.logprobs] == ["a", "b"]
    assert output.token_ids == tuple(byte_ids("ab"))


def test_prompt_records_come_once(tokenizer: Tokenizer) -> None:
    entry = TokenLogprobs(byte_ids("a")[0], -0.5, 1, ())

    first, second = run(
        start(tokenizer, prompt_logprobs=0),
        delta(byte_ids("x"), prompt_logprobs=(entry,)),
        delta(byte_ids("y")),
    )

    assert first.prompt_logprobs is not None
    assert [record.text for record in first.prompt_logprobs] == ["a"]
    assert second.prompt_logprobs is None


def test_merged_outputs_equal_the_single_ones(tokenizer: Tokenizer) -> None:
    outputs = run(
        start(tokenizer, n=2, logprobs=0),
        scored(byte_ids("ab"), index=0),
        scored(byte_ids("x"), index=1),
        scored(byte_ids("c"), index=0, finish_reason=FinishReason.LENGTH, num_cached_tokens=16),
    )

    merged = merge_outputs(outputs)

    assert [(output.index, output.text) for output in merged] == [(0, "abc"), (1, "x")]
    assert merged[0].num_output_tokens == 3
    assert [record.text_offset for record in merged[0].logprobs] == [0, 1, 2]
    assert merged[0].finish_reason is FinishReason.LENGTH
    assert merged[0].num_cached_tokens == 16
