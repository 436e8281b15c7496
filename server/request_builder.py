"""From a body and its prompt to the engine's request; shared by all routes that generate."""

from collections.abc import Sequence

from octavo.config.server import ServerConfig
from octavo.engine.core.limits import EngineLimits
from octavo.server.engine_stream import GenerateRequest
from octavo.server.generation import (
    PromptEncoder,
    RouteParams,
    WantedTokens,
    check_num_logprobs,
    check_settings,
    sampling_params,
    truncate_prompt,
)
from octavo.server.logprobs import LogprobStyle
from octavo.server.protocol.common import GenerationBody
from octavo.server.served_model import ServedModel


class RequestBuilder:
    """Applies the settings of the model and of the server to bodies; may be used in any thread."""

    def __init__(
        self,
        model: ServedModel,
        limits: EngineLimits,
        config: ServerConfig,
        priority_scheduling: bool = False,
    ) -> None:
        self.model = model
        self.config = config
        self.encoder = PromptEncoder(model)
        self._limits = limits
        self._priority_scheduling = priority_scheduling

    def check(self, body: GenerationBody, logprobs_field: str, num_logprobs: int | None) -> str:
        """Check what needs no prompt, and return the served name of the model.

        Raises ModelNotFoundError and InvalidRequestError.
        """
        name = self.model.resolve_name(body.model)
        check_settings(body, self.model, self.config, self._priority_scheduling)
        check_num_logprobs(logprobs_field, num_logprobs, self.config)
        return name

    def truncate(
        self, token_ids: list[int], body: GenerationBody, wanted: WantedTokens
    ) -> list[int]:
        """Return what `truncate_prompt_tokens` leaves of a prompt."""
        return truncate_prompt(token_ids, body, wanted, self.model.max_model_len)

    def build(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        body: GenerationBody,
        wanted: WantedTokens,
        route: RouteParams,
    ) -> GenerateRequest:
        """Return the request of one prompt. Raises InvalidRequestError and ContextLengthError."""
        num_tokens = len(prompt_token_ids)
        max_tokens = wanted.resolve(
            num_tokens, self.model.max_model_len, self.config.clamp_max_tokens
        )
        params = sampling_params(body, self.model, max_tokens, route)
        self._limits.check_beams(num_tokens, params)
        return GenerateRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            priority=body.priority,
            cache_salt=body.cache_salt,
        )

    def logprob_style(
        self, body: GenerationBody, num_top: int, hidden_ids: frozenset[int] = frozenset()
    ) -> LogprobStyle:
        """Return how the tokens of an answer are written."""
        as_ids = body.return_tokens_as_token_ids
        return LogprobStyle(
            num_top=num_top,
            as_token_ids=self.config.return_tokens_as_token_ids if as_ids is None else as_ids,
            hidden_ids=hidden_ids,
        )
