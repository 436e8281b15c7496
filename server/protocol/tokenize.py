"""Bodies of /tokenize and /detokenize."""

from typing import ClassVar

from pydantic import BaseModel, Field

from octavo.server.protocol.chat import ChatPrompt
from octavo.server.protocol.common import RequestBody, TokenIds
from octavo.server.protocol.unsupported import NeutralValues


class TokensBody(RequestBody):
    """Base: which model's tokenizer."""

    model: str | None = Field(default=None, description="One of the served model names.")


class TokenizeTextRequest(TokensBody):
    """Tokenize plain text."""

    prompt: str = Field(examples=["The capital of France is"])
    add_special_tokens: bool = Field(default=True, description="Add BOS and the like.")
    return_token_strs: bool = Field(default=False, description="Give the tokens' pieces too.")


class TokenizeChatRequest(ChatPrompt, TokensBody):
    """Tokenize a conversation as the chat route does."""

    unsupported: ClassVar[dict[str, NeutralValues]] = {"tools": ([],), "documents": ([],)}

    return_token_strs: bool = Field(default=False, description="Give the tokens' pieces too.")


class TokenizeResponse(BaseModel):
    """The token ids, and how many the model can take."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(TokensBody):
    """Token ids to be turned into text."""

    tokens: TokenIds = Field(examples=[[1, 2, 3]])


class DetokenizeResponse(BaseModel):
    """The text, special tokens included."""

    prompt: str
