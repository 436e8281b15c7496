"""The event loop's side of the engine: one stream of outputs per request."""

from dataclasses import dataclass

from octavo.engine.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt. `request_id` must be unique among the unfinished ones."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
