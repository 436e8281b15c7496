"""Bodies of /v1/responses."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from octavo.engine.core.errors import InvalidRequestError, UnsupportedParameterError
from octavo.server.protocol.chat import PositiveInt, ReasoningEffort
from octavo.server.protocol.common import GenerationBody, JsonObject, Metadata
from octavo.server.protocol.response_items import ResponseInput
from octavo.server.protocol.unsupported import RESPONSES, RESPONSES_HINTS, NeutralValues

Summary = Literal["auto", "concise", "detailed"]
LOGPROBS = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class _Settings(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class TextFormat(_Settings):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]


class TextSettings(_Settings):
    """What the text is like."""

    format: TextFormat | None = Field(default=None, description="Only `text` is supported.")


class ReasoningSettings(_Settings):
    """How the model thinks; the effort is handed to the template."""

    effort: ReasoningEffort | None = None
    summary: Summary | None = Field(default=None, description="Accepted without effect.")


class ResponsesRequest(GenerationBody):
    """The body of a request for a response. Nothing is kept between requests."""

    unsupported: ClassVar[Mapping[str, NeutralValues]] = RESPONSES
    hints: ClassVar[Mapping[str, str]] = RESPONSES_HINTS

    input: ResponseInput = Field(
        description="The user's text, or the items of the conversation so far.",
        examples=["What is the capital of France?"],
    )
    instructions: str | None = Field(
        default=None, description="A system message before everything else."
    )
    max_output_tokens: PositiveInt | None = Field(
        default=None, description="Most tokens to generate; default: up to the context's end."
    )
    top_logprobs: int | None = Field(
        default=None, ge=0, description="Alternatives per token; above 0 includes logprobs."
    )
    include: list[Include] | None = Field(
        default=None, description=f"`{LOGPROBS}` lists every token with its logprob."
    )
    text: TextSettings | None = Field(default=None, description="Form of the text.")
    reasoning: ReasoningSettings | None = Field(default=None, description="How to think.")
    tool_choice: Any | None = Field(default=None, description="Only together with `tools`.")
    parallel_tool_calls: bool = Field(default=True, description="Has no effect without tools.")
    store: bool = Field(default=False, description="Accepted without effect: nothing is kept.")
    metadata: Metadata | None = Field(
        default=None, description="Up to 16 texts by name, which come back with the answer."
    )
    chat_template_kwargs: JsonObject | None = Field(
        default=None, description="Extra variables for the template."
    )

    @model_validator(mode="after")
    def _check_responses(self) -> Self:
        form = self.text.format if self.text is not None else None
        if form is not None and form.type != "text":
            raise UnsupportedParameterError(
                f"`text.format` of the type {form.type} is not supported", "text.format"
            )
        if self.tool_choice not in (None, "auto", "none"):
            raise InvalidRequestError("`tool_choice` is allowed only with `tools`", "tool_choice")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token; None for no logprobs at all."""
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return None


class OutputTextPart(BaseModel):
    """Generated text."""

    type: Literal["output_text"]
    text: str
    annotations: list[JsonObject]
    logprobs: list[JsonObject]


class OutputMessage(BaseModel):
    """The generated message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputTextPart]


class ReasoningTextPart(BaseModel):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    """What the model thought before the message; only with --reasoning-parser."""

    id: str
    type: Literal["reasoning"]
    summary: list[JsonObject]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[ReasoningTextPart]


class InputTokensDetails(BaseModel):
    """Where the input tokens came from."""

    cached_tokens: int


class OutputTokensDetails(BaseModel):
    """What the generated tokens were for."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Tokens of the request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFault(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """The plain answer, and what the first and the last events of a stream hold."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputReasoning | OutputMessage]
    usage: ResponseUsage | None
    model: str
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    text: JsonObject
    reasoning: JsonObject
    tools: list[JsonObject]
    tool_choice: Any
    parallel_tool_calls: bool
    truncation: Literal["disabled"]
    store: bool
    metadata: dict[str, str]
    background: Literal[False]
    previous_response_id: None
