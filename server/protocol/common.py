"""What the bodies of several routes share: sampling, output and stream fields, and usage."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from octavo.engine.core.errors import InvalidRequestError
from octavo.engine.core.sampling_params import (
    MAX_CHOICES,
    MAX_LENGTH_PENALTY,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    EarlyStopping,
)
from octavo.server.protocol.unsupported import HINTS, NeutralValues

INT64_MAX = 2**63 - 1
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 1000
MAX_METADATA = 16
MAX_METADATA_NAME = 64
MAX_METADATA_TEXT = 512

_MAX_ID_DIGITS = 10

WITHOUT_EFFECT = frozenset(
    {
        *("store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "prediction", "verbosity"),
        "moderation",
    }
)
"""Fields that are accepted in any form and change nothing."""


def invalid(text: str) -> PydanticCustomError:
    """A validation error whose text follows the name of the field, as in "must be ..."."""
    return PydanticCustomError("octavo", "{text}", {"text": text})


def _parse_stop(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("must be a string or an array of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise invalid(f"must hold at most {MAX_STOP_STRINGS} strings")
    if "" in stops:
        raise invalid("must not hold an empty string")
    if max(map(len, stops), default=0) > MAX_STOP_CHARS:
        raise invalid(f"must hold strings of at most {MAX_STOP_CHARS} characters")
    return stops


def _parse_logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise invalid("must be an object of token ids and numbers")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS):
            raise invalid("must have token ids as keys, written as decimal numbers")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise invalid("must have numbers between -100 and 100 as values")
        if int(key) in biases:
            raise invalid("must name each token id once")
        biases[int(key)] = float(bias)
    return biases


def _parse_early_stopping(value: object) -> bool | str:
    if value is True or value is False or value == "never":
        return value
    raise invalid('must be true, false or "never"')


def _parse_metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise invalid(f"must be an object of at most {MAX_METADATA} texts")
    for name, text in value.items():
        if len(name) > MAX_METADATA_NAME:
            raise invalid(f"must have names of at most {MAX_METADATA_NAME} characters")
        if not isinstance(text, str) or len(text) > MAX_METADATA_TEXT:
            raise invalid(f"must have texts of at most {MAX_METADATA_TEXT} characters as values")
    return value


_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
StopStrings = Annotated[
    list[str],
    BeforeValidator(_parse_stop),
    WithJsonSchema(
        {
            "anyOf": [
                _STOP,
                {
                    "type": "array",
                    "items": _STOP,
                    "maxItems": MAX_STOP_STRINGS,
                },
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_parse_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
TokenId = Annotated[int, Field(ge=0)]
# A named alias, since the marker inside cannot be hashed as a member of a union.
TokenIds = TypeAliasType("TokenIds", Annotated[list[TokenId], FailFast()])
NonEmptyText = Annotated[str, Field(min_length=1)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
Metadata = Annotated[
    dict[str, str],
    BeforeValidator(_parse_metadata),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_METADATA,
            "propertyNames": {"maxLength": MAX_METADATA_NAME},
            "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_TEXT},
        }
    ),
]


class RequestBody(BaseModel):
    """Base of all request bodies: strict types, unknown fields left out."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, validate_default=False)

    unsupported: ClassVar[Mapping[str, NeutralValues]] = {}
    hints: ClassVar[Mapping[str, str]] = HINTS

    @classmethod
    def known_fields(cls) -> frozenset[str]:
        """Names that are read, refused, or known to change nothing."""
        return frozenset(cls.model_fields) | cls.unsupported.keys() | WITHOUT_EFFECT


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    include_usage: bool | None = Field(
        default=None, description="Send one more chunk at the end with the usage."
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="With include_usage: every chunk carries the usage so far."
    )


class GenerationBody(RequestBody):
    """Fields that completions and chat completions share."""

    model: str | None = Field(
        default=None,
        description="One of the served model names; default: the first.",
        examples=["SmolLM2-135M-Instruct"],
    )
    stream: bool = Field(default=False, description="Send the answer as server-sent events.")
    stream_options: StreamOptions | None = Field(
        default=None, description="Only together with `stream: true`."
    )
    user: str | None = Field(default=None, description="Accepted without effect.")
    metadata: Metadata | None = Field(
        default=None, description="Up to 16 texts by name; accepted without effect."
    )

    temperature: float | None = Field(
        default=None, ge=0, le=2, description="0 is greedy. Default: the model's own, else 1."
    )
    top_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Keep the smallest set of best tokens with this mass; 0 is greedy. "
        "Default: the model's own, else 1.",
    )
    top_k: int | None = Field(
        default=None,
        ge=-1,
        description="Keep the k best tokens; 0 and -1 are off. Default: the model's own, else 0.",
    )
    min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Keep tokens with at least this share of the best one's probability. "
        "Default: the model's own, else 0.",
    )
    presence_penalty: float = Field(
        default=0, ge=-2, le=2, description="Taken once from the logit of each generated token."
    )
    frequency_penalty: float = Field(
        default=0, ge=-2, le=2, description="Taken from a token's logit per time it was generated."
    )
    repetition_penalty: float | None = Field(
        default=None,
        gt=0,
        description="Divides positive and multiplies negative logits of tokens in prompt and "
        "output. Default: the model's own, else 1.",
    )
    use_beam_search: bool = Field(
        default=False,
        description="Return the `n` best texts of a search with `best_of`, else `n` beams; "
        "nothing is drawn. Not with `stream` or penalties.",
    )
    length_penalty: float = Field(
        default=1,
        ge=-MAX_LENGTH_PENALTY,
        le=MAX_LENGTH_PENALTY,
        description="A beam's score is the sum of its logprobs / length ** length_penalty.",
    )
    early_stopping: Annotated[EarlyStopping, BeforeValidator(_parse_early_stopping)] = Field(
        default=False,
        description="When a beam search that has found as many texts as it has beams ends: at once "
        "(true), when the best beam would be no better if it ended now (false), or could be no "
        'better at any length ("never").',
    )
    logit_bias: LogitBias | None = Field(
        default=None, description="Added to the logits, by token id.", examples=[{"42": -100}]
    )
    seed: int | None = Field(
        default=None,
        ge=-INT64_MAX - 1,
        le=INT64_MAX,
        description="Fixes the random stream of each choice.",
    )
    n: int = Field(default=1, ge=1, le=MAX_CHOICES, description="Number of choices per prompt.")
    stop: StopStrings | None = Field(
        default=None,
        description=f"A string or up to {MAX_STOP_STRINGS}; the text ends before the first match.",
        examples=[["\n\n"]],
    )
    stop_token_ids: TokenIds | None = Field(
        default=None, description="Each of these ids ends the text."
    )
    include_stop_str_in_output: bool = Field(
        default=False, description="Keep the stop string or stop token in the text."
    )
    ignore_eos: bool = Field(
        default=False, description="The model's end tokens do not end the text."
    )
    min_tokens: int = Field(
        default=0, ge=0, description="No end before this many generated tokens."
    )
    skip_special_tokens: bool = Field(
        default=True, description="Leave special tokens out of the text."
    )
    spaces_between_special_tokens: bool = Field(
        default=True, description="Put spaces between special tokens where the tokenizer does so."
    )
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=-1, description="Keep this many prompt tokens; -1 keeps what fits."
    )
    truncation_side: Literal["left", "right"] = Field(
        default="left", description="The side of the prompt that truncation takes away."
    )
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        description="List every prompt token with this many alternatives. Not with `stream`.",
    )
    allowed_token_ids: TokenIds | None = Field(
        default=None, min_length=1, description="Only these ids can be generated."
    )
    bad_words: list[BadWord] | None = Field(
        default=None, max_length=MAX_BAD_WORDS, description="Strings that are never generated."
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Write tokens in logprobs as `token_id:N`."
    )
    return_token_ids: bool = Field(
        default=False, description="Give the token ids of prompt and answer."
    )
    priority: int = Field(
        default=0, ge=-INT64_MAX - 1, le=INT64_MAX, description="Lower is served first."
    )
    cache_salt: NonEmptyText | None = Field(
        default=None, description="Cached prefixes are shared only between equal salts."
    )
    request_id: str | None = Field(
        default=None,
        pattern=r"^[\x21-\x7e]{1,128}$",
        description="Used as `x-request-id`, unless the header is sent.",
    )

    @model_validator(mode="after")
    def _check_shared(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "`stream_options` is allowed only with `stream: true`", "stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "`prompt_logprobs` cannot be combined with `stream: true`", "prompt_logprobs"
            )
        if self.stream and self.use_beam_search:
            raise InvalidRequestError(
                "`use_beam_search` cannot be combined with `stream: true`", "use_beam_search"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "`truncate_prompt_tokens` must be -1 or at least 1", "truncate_prompt_tokens"
            )
        return self

    @property
    def include_usage(self) -> bool:
        """True when a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True when every chunk of a stream carries the usage so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class PromptTokensDetails(BaseModel):
    """Where the prompt tokens came from."""

    cached_tokens: int = Field(description="Prompt tokens taken from the prefix cache.")


class CompletionTokensDetails(BaseModel):
    """What the generated tokens were for."""

    reasoning_tokens: int = 0


class Usage(BaseModel):
    """Tokens of a request; a prompt counts once, choices are summed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = Field(description="The field at fault.")
    code: str | None = Field(description="Machine-readable reason.")


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorObject


JsonObject = dict[str, Any]
