"""Bodies of /v1/embeddings."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from octavo.server.protocol.common import RequestBody, invalid
from octavo.server.protocol.completion import Prompts, parse_batch
from octavo.server.protocol.unsupported import NeutralValues

MAX_INPUTS = 2048


def _parse_input(value: object) -> Prompts:
    inputs = parse_batch(value, MAX_INPUTS)
    if "" in inputs:
        raise invalid("must not hold an empty string")
    return inputs


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}

InputField = Annotated[
    Prompts,
    BeforeValidator(_parse_input),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_INPUTS},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_INPUTS},
            ]
        }
    ),
]


class EmbeddingRequest(RequestBody):
    """The body of an embedding request."""

    unsupported: ClassVar[dict[str, NeutralValues]] = {
        "messages": (),
        "truncate_prompt_tokens": (),
        "normalize": (True,),
        "use_activation": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "task": (),
        "input_type": (),
        "prompt_name": (),
    }

    model: str | None = Field(
        default=None, description="One of the served model names; default: the first."
    )
    input: InputField = Field(
        description="Text or token ids: one input or a batch.",
        examples=["The food was delicious."],
    )
    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="base64 holds the bytes of little-endian 32-bit floats."
    )
    dimensions: int | None = Field(
        default=None,
        ge=1,
        description="Length to cut the vectors to; only for models trained for it.",
    )
    add_special_tokens: bool = Field(
        default=True, description="Let the tokenizer add its special tokens to texts."
    )
    user: str | None = Field(default=None, description="Accepted without effect.")


class EmbeddingObject(BaseModel):
    """The vector of one input, of length 1; as numbers or in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """The answer, in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
