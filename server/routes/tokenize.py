"""POST /tokenize and /detokenize."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from octavo.engine.core.errors import ContextLengthError, InvalidRequestError
from octavo.server.openapi import describe_body
from octavo.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeResponse,
    TokenizeTextRequest,
)
from octavo.server.served_model import ServedModel
from octavo.server.state import Serving, get_state
from octavo.server.validation.fields import read_fields

router = APIRouter(tags=["tokens"])


def _kind_of(body: Mapping[str, Any]) -> type[TokenizeTextRequest | TokenizeChatRequest]:
    has_prompt, has_messages = (body.get(name) is not None for name in ("prompt", "messages"))
    if has_prompt == has_messages:
        text = "exclude each other; give one of them" if has_prompt else "are missing; give one"
        raise InvalidRequestError(f"`prompt` and `messages` {text}", "prompt")
    return TokenizeTextRequest if has_prompt else TokenizeChatRequest


@router.post(
    "/tokenize", **describe_body(TokenizeTextRequest | TokenizeChatRequest, TokenizeResponse)
)
async def tokenize(request: Request) -> TokenizeResponse:
    """Return the token ids of a text, or of a conversation as the chat route sees it."""
    serving = get_state(request).require_serving()
    with serving.admission.admit():
        return await _tokenize(request, serving)


async def _tokenize(request: Request, serving: Serving) -> TokenizeResponse:
    body = await read_fields(request, _kind_of)
    model = serving.model
    model.resolve_name(body.model)

    def work() -> TokenizeResponse:
        if isinstance(body, TokenizeChatRequest):
            token_ids = serving.chat.encode_messages(body).token_ids
        else:
            token_ids = serving.completions.encode_text(body.prompt, body.add_special_tokens)
        pieces = map(model.tokenizer.token_piece, token_ids)
        return TokenizeResponse(
            count=len(token_ids),
            max_model_len=model.max_model_len,
            tokens=token_ids,
            token_strs=list(pieces) if body.return_token_strs else None,
        )

    return await model.text_work(work)


@router.post("/detokenize", **describe_body(DetokenizeRequest, DetokenizeResponse))
async def detokenize(request: Request) -> DetokenizeResponse:
    """Return the text of token ids, special tokens included."""
    serving = get_state(request).require_serving()
    with serving.admission.admit():
        return await _detokenize(request, serving.model)


async def _detokenize(request: Request, model: ServedModel) -> DetokenizeResponse:
    body = await read_fields(request, lambda _: DetokenizeRequest)
    model.resolve_name(body.model)
    if len(body.tokens) > model.max_model_len:
        raise ContextLengthError(
            f"`tokens` must hold at most {model.max_model_len} ids, as many as the context does",
            "tokens",
        )
    if body.tokens and max(body.tokens) >= model.vocab_size:
        raise InvalidRequestError(
            f"`tokens` must hold token ids from 0 to {model.vocab_size - 1}", "tokens"
        )
    text = await model.text_work(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return DetokenizeResponse(prompt=text)
