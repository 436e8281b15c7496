"""What is sent and when: the data sets and the arrival times.

Everything is drawn before the run, from one seeded generator, so that a run can be repeated and
drawing costs nothing while time is measured.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

# Each of these words is one token, or close to it, in the vocabularies of today's models.
WORDS = (
    " the of and to in is that for it as was with be by on not he his but at are this have from or"
    " had an they which one you were all her she there would their we him been has when who will"
    " no more if out so up said what its about than into them can only other time new some could"
    " these two may first then do any like my now over such our man me even most made after also"
    " did many off before must well back through years much where your way down should because long"
    " each just state people those too good world very still own see men work here get both between"
    " life being under three never know same last another while us might great year since against"
    " go came right used take himself few house use place during high without again home around"
    " small however found part school once general left number course war until always away"
    " something fact water less public put think almost hand enough far took head yet government"
    " system set better told nothing night end called"
)
_CHARACTERS_PER_TOKEN = 4
# Bounds of the ShareGPT selection that other load tests use; in tokens.
_SHAREGPT_SHORTEST = 4
_SHAREGPT_LONGEST_PROMPT = 1024
_SHAREGPT_LONGEST_TOTAL = 2048


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: its text or token ids, their number in tokens, and how many to generate."""

    content: str | list[int]
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of made prompts and answers in tokens, each spread by the factor `spread`."""

    input_len: int
    output_len: int
    spread: float = 0.0

    def draw(self, rng: np.random.Generator, count: int) -> Iterator[tuple[int, int]]:
        """`count` pairs of input and output length, uniform within length * (1 +- spread)."""
        columns = []
        for length in (self.input_len, self.output_len):
            low = max(1, math.floor(length * (1 - self.spread)))
            high = max(1, math.ceil(length * (1 + self.spread)))
            columns.append(rng.integers(low, high + 1, count).tolist())
        return zip(*columns, strict=True)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Shared beginnings: `count` of them, `prefix_len` tokens long, each with own endings."""

    count: int
    prefix_len: int
    suffix_len: int


class Vocabulary:
    """The pieces that random prompts are made of: token ids, or words of about one token each."""

    def __init__(self, pieces: Sequence[int] | Sequence[str]) -> None:
        self._pieces = pieces

    @classmethod
    def of_words(cls) -> "Vocabulary":
        """Words, for servers and routes that take text only."""
        return cls([f" {word}" for word in WORDS.split()])

    def draw(self, rng: np.random.Generator, length: int) -> list[int] | list[str]:
        """`length` pieces, uniform and independent."""
        return [self._pieces[i] for i in rng.integers(len(self._pieces), size=length)]

    @staticmethod
    def prompt(pieces: Sequence[int | str], output_len: int) -> Prompt:
        """A request from drawn pieces."""
        if isinstance(pieces[0], str):
            content: Any = "".join(map(str, pieces))
        else:
            content = list(pieces)
        return Prompt(content, len(pieces), output_len)


def random_prompts(
    rng: np.random.Generator, vocabulary: Vocabulary, count: int, lengths: Lengths
) -> list[Prompt]:
    """Prompts that have nothing in common."""
    return [
        vocabulary.prompt(vocabulary.draw(rng, input_len), output_len)
        for input_len, output_len in lengths.draw(rng, count)
    ]


def prefix_repetition_prompts(
    rng: np.random.Generator,
    vocabulary: Vocabulary,
    count: int,
    prefixes: Prefixes,
    output_len: int,
) -> list[Prompt]:
    """Prompts that share long beginnings, in random order; every prefix is used equally often."""
    heads = [vocabulary.draw(rng, prefixes.prefix_len) for _ in range(prefixes.count)]
    prompts = [
        vocabulary.prompt(
            [*heads[number % prefixes.count], *vocabulary.draw(rng, prefixes.suffix_len)],
            output_len,
        )
        for number in range(count)
    ]
    return [prompts[i] for i in rng.permutation(count)]


def sharegpt_prompts(
    rng: np.random.Generator, path: Path, count: int, output_len: int | None
) -> list[Prompt]:
    """First questions of conversations of a ShareGPT file, at random.

    Lengths are estimated at four characters a token; the report takes the server's own counts.

    Raises:
        ValueError: `path` is not such a file or holds no conversation of a usable length.
    """
    usable = []
    for question, answer in _conversations(path):
        prompt_len = len(question) // _CHARACTERS_PER_TOKEN
        answer_len = output_len or len(answer) // _CHARACTERS_PER_TOKEN
        if (
            min(prompt_len, answer_len) >= _SHAREGPT_SHORTEST
            and prompt_len <= _SHAREGPT_LONGEST_PROMPT
            and prompt_len + answer_len <= _SHAREGPT_LONGEST_TOTAL
        ):
            usable.append(Prompt(question, prompt_len, answer_len))
    if not usable:
        raise ValueError(f"{path} holds no conversation of a usable length")
    order = rng.permutation(len(usable)).tolist()
    return [usable[order[i % len(order)]] for i in range(count)]


def _conversations(path: Path) -> Iterator[tuple[str, str]]:
    """The first two turns of each conversation that has them."""
    try:
        for entry in orjson.loads(path.read_bytes()):
            turns = entry.get("conversations", [])
            if len(turns) >= 2:
                yield turns[0]["value"], turns[1]["value"]
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a ShareGPT file: {error}") from error


def custom_prompts(path: Path, count: int, output_len: int | None) -> list[Prompt]:
    """Prompts of a JSONL file, in its order, from the start again when there are too few.

    A line is `{"prompt": text or list of ids, "output_tokens": number}`; `output_len`, if given,
    counts over `output_tokens`.

    Raises:
        ValueError: `path` is not such a file or is empty; the message names the line.
    """
    prompts = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_custom_prompt(orjson.loads(line), output_len))
        except (orjson.JSONDecodeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return [prompts[i % len(prompts)] for i in range(count)]


def _custom_prompt(entry: Any, output_len: int | None) -> Prompt:  # noqa: ANN401 - any JSON value
    content = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(content, str | list) or not content:
        raise ValueError('expected {"prompt": text or list of ids}')
    length = output_len or entry.get("output_tokens")
    if not isinstance(length, int) or length < 1:
        raise ValueError("give output_tokens in the line, or --output-len")
    estimate = len(content) if isinstance(content, list) else len(content) // _CHARACTERS_PER_TOKEN
    return Prompt(content, max(1, estimate), length)


def arrival_times(
    rng: np.random.Generator, count: int, request_rate: float, burstiness: float
) -> list[float]:
    """Seconds after the start at which each request is sent; the last one is count / rate.

    The gaps follow a gamma distribution with shape `burstiness`: 1 is a Poisson process, below is
    burstier, above more even. They are scaled so that every run offers exactly the asked rate.
    With an infinite rate all requests are sent at once.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    times = np.cumsum(rng.gamma(burstiness, 1 / (request_rate * burstiness), count))
    scaled: list[float] = (times * (count / request_rate / times[-1])).tolist()
    return scaled
