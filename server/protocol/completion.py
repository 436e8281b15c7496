"""Bodies of /v1/completions."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema, model_validator

from octavo.engine.core.errors import InvalidRequestError
from octavo.server.protocol.common import GenerationBody, JsonObject, Usage, invalid
from octavo.server.protocol.unsupported import COMPLETION, NeutralValues

MAX_PROMPTS = 1024
MAX_BEST_OF = 20
DEFAULT_MAX_TOKENS = 16

Prompts = list[str] | list[list[int]]
"""A batch: all texts, or all lists of token ids."""


def _all_ints(values: list[object]) -> bool:
    return all(type(value) is int for value in values)


def parse_batch(value: object, most: int) -> Prompts:
    """Return the batch that `value` stands for: one prompt or several, as text or as ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise invalid("must be a string or a non-empty array of strings or of token ids")
    if all(isinstance(part, str) for part in value):
        prompts: Prompts = value
    elif _all_ints(value):
        prompts = [value]
    elif all(isinstance(part, list) and part and _all_ints(part) for part in value):
        prompts = value
    else:
        raise invalid("must hold only strings, only token ids, or only non-empty arrays of ids")
    if len(prompts) > most:
        raise invalid(f"must hold at most {most} prompts")
    return prompts


def parse_prompts(value: object) -> Prompts:
    """Return the batch of a completion request."""
    return parse_batch(value, MAX_PROMPTS)


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

PromptField = Annotated[
    Prompts,
    BeforeValidator(parse_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {"type": "string"},
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                },
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ],
            "default": "",
        }
    ),
]


class CompletionRequest(GenerationBody):
    """The body of a completion request."""

    unsupported: ClassVar[dict[str, NeutralValues]] = dict(COMPLETION)

    prompt: PromptField = Field(
        default=[""],
        description="Text or token ids, one prompt or a batch. Empty: from the model's BOS token.",
        examples=["The capital of France is"],
    )
    max_tokens: int = Field(
        default=DEFAULT_MAX_TOKENS,
        ge=0,
        description="Most tokens to generate; 0 generates nothing (scoring with echo).",
        examples=[16],
    )
    best_of: int | None = Field(
        default=None,
        ge=1,
        le=MAX_BEST_OF,
        description="Generate this many and return the n with the best mean logprob; "
        "with `use_beam_search` the number of beams.",
    )
    echo: bool = Field(default=False, description="Begin the text with the prompt.")
    logprobs: int | None = Field(
        default=None, ge=0, description="Alternatives per token; 0 gives the chosen token only."
    )
    add_special_tokens: bool = Field(
        default=True, description="Add BOS and the like to prompts given as text."
    )

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of is None:
            return self
        if self.best_of < self.n:
            raise InvalidRequestError("`best_of` must not be below `n`", "best_of")
        if self.stream:
            raise InvalidRequestError("`best_of` cannot be combined with `stream`", "best_of")
        return self


class CompletionLogprobs(BaseModel):
    """One entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One generated text."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    logprobs: CompletionLogprobs | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[JsonObject | None] | None = None


class Completion(BaseModel):
    """The plain answer."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
