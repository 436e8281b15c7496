"""Bodies of /v1/chat/completions."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator

from octavo.engine.core.errors import InvalidRequestError, UnsupportedParameterError
from octavo.server.protocol.common import GenerationBody, JsonObject, Usage
from octavo.server.protocol.messages import Messages
from octavo.server.protocol.unsupported import CHAT, NeutralValues

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
PositiveInt = Annotated[int, Field(ge=1)]


class ChatPrompt(BaseModel):
    """Fields that decide how messages become a prompt; shared with /tokenize."""

    messages: Messages = Field(
        description="The conversation so far.",
        examples=[[{"role": "user", "content": "What is the capital of France?"}]],
    )
    add_generation_prompt: bool = Field(
        default=True, description="Let the template open the assistant's turn."
    )
    continue_final_message: bool = Field(
        default=False,
        description="Continue the last assistant message; needs `add_generation_prompt: false`.",
    )
    add_special_tokens: bool = Field(
        default=False, description="Let the tokenizer add BOS on top of the template."
    )
    chat_template: str | None = Field(
        default=None, description="A Jinja template; only with --trust-request-chat-template."
    )
    chat_template_kwargs: JsonObject | None = Field(
        default=None, description="Extra variables for the template."
    )

    @model_validator(mode="after")
    def _check_assistant_content(self) -> Self:
        for place, message in enumerate(self.messages):
            if message["role"] != "assistant" or message.get("tool_calls"):
                continue
            if message.get("content") is None:
                raise InvalidRequestError(
                    f"`messages[{place}].content` is required without tool calls", "messages"
                )
        return self

    @model_validator(mode="after")
    def _check_continuation(self) -> Self:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise InvalidRequestError(
                "`continue_final_message` needs `add_generation_prompt: false`",
                "continue_final_message",
            )
        if self.messages[-1]["role"] != "assistant":
            raise InvalidRequestError(
                "`continue_final_message` needs an assistant message at the end",
                "continue_final_message",
            )
        return self


class ChatCompletionRequest(ChatPrompt, GenerationBody):
    """The body of a chat completion request."""

    unsupported: ClassVar[dict[str, NeutralValues]] = dict(CHAT)

    max_completion_tokens: PositiveInt | None = Field(
        default=None, description="Most tokens to generate; default: up to the context's end."
    )
    max_tokens: PositiveInt | None = Field(
        default=None, description="The old name of max_completion_tokens, which wins over it."
    )
    best_of: int | None = Field(default=None, description="Not supported: give it as `n`.")
    logprobs: bool = Field(default=False, description="List every token with its logprob.")
    top_logprobs: int | None = Field(
        default=None, ge=0, description="Alternatives per token; needs `logprobs: true`."
    )
    echo: bool = Field(
        default=False, description="With continue_final_message: begin with that message's text."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        default=None, description="Handed to the template."
    )
    tool_choice: Any | None = Field(default=None, description="Only together with `tools`.")
    parallel_tool_calls: bool = Field(default=True, description="Has no effect without tools.")

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "`top_logprobs` is allowed only with `logprobs: true`", "top_logprobs"
            )
        if self.tool_choice is not None:
            raise InvalidRequestError("`tool_choice` is allowed only with `tools`", "tool_choice")
        if self.best_of is not None and self.best_of != self.n:
            raise UnsupportedParameterError("`best_of` is not supported here; use `n`", "best_of")
        if self.echo and not self.continue_final_message:
            raise InvalidRequestError(
                "`echo` is allowed only with `continue_final_message: true`", "echo"
            )
        return self

    @property
    def wanted_tokens(self) -> int | None:
        """The limit that counts; None for up to the context's end."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TopLogprob(BaseModel):
    """A candidate at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A generated token and the best candidates at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-softmax of the raw logits, one entry per token."""

    content: list[TokenLogprob]
    refusal: None


class AssistantAnswer(BaseModel):
    """The generated message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = Field(default=None, description="Only with --reasoning-parser.")
    reasoning_content: str | None = Field(default=None, description="The same as `reasoning`.")


class ChatChoice(BaseModel):
    """One generated message and how it ended."""

    index: int
    message: AssistantAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The plain answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[JsonObject | None] | None = None
