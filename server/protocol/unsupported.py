"""Fields of other servers that would change the output and are not built.

Each has neutral values, which count as absent. A field leaves this list when it is built.
"""

from collections.abc import Mapping
from typing import Any

from octavo.engine.core.errors import UnsupportedParameterError

NeutralValues = tuple[Any, ...]

_COMMON: dict[str, NeutralValues] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "prompt_embeds": ("", []),
    "documents": ([],),
    "logits_processors": ([],),
    "custom_logit_processor": ("",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
    "typical_p": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "stop_regex": ("", []),
    "lora_path": ("",),
    "kv_transfer_params": ({},),
}
"""Field -> its neutral values."""

COMPLETION: dict[str, NeutralValues] = {**_COMMON, "max_completion_tokens": ()}
CHAT: dict[str, NeutralValues] = {**_COMMON, "tools": ([],)}

RESPONSES: dict[str, NeutralValues] = {
    **_COMMON,
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "tools": ([],),
    "truncation": ("disabled",),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "messages": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "reasoning_effort": (),
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
}
RESPONSES_HINTS = {
    "response_format": " here; use text.format",
    "previous_response_id": ": nothing is kept between requests; send the whole conversation",
    "conversation": ": nothing is kept between requests; send the whole conversation",
    "background": ": nothing is kept between requests",
    "prompt": " here; use input",
    "messages": " here; use input",
    "max_tokens": " here; use max_output_tokens",
    "max_completion_tokens": " here; use max_output_tokens",
    "reasoning_effort": " here; use reasoning.effort",
    "logprobs": " here; use include or top_logprobs",
}

_SWITCHES = {"mirostat_": "mirostat", "dry_": "dry_multiplier", "xtc_": "xtc_probability"}
"""Prefix of the settings of a sampler -> the field whose neutral value turns it off.

Clients that send all their defaults send the settings beside a neutral switch.
"""

HINTS = {
    "guided_json": "; use structured_outputs",
    "guided_regex": "; use structured_outputs",
    "guided_choice": "; use structured_outputs",
    "guided_grammar": "; use structured_outputs",
    "max_completion_tokens": " here; use max_tokens",
}


def check_unsupported(
    given: Mapping[str, Any],
    unsupported: Mapping[str, NeutralValues],
    hints: Mapping[str, str],
) -> None:
    """Raise UnsupportedParameterError for the first field of `given` that is not neutral.

    `hints` end the message of some fields.
    """
    for name, value in given.items():
        neutral = unsupported.get(name)
        if neutral is not None:
            refused = not _is_neutral(value, neutral)
        else:
            refused = _is_setting_of_active_sampler(name, given, unsupported)
        if refused:
            hint = hints.get(name, "")
            raise UnsupportedParameterError(f"`{name}` is not supported{hint}", name)


def _is_neutral(value: object, neutral: NeutralValues) -> bool:
    # 0 == False in Python; a boolean is never neutral for a number nor the reverse.
    return any(
        value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
        for allowed in neutral
    )


def _is_setting_of_active_sampler(
    name: str, given: Mapping[str, Any], unsupported: Mapping[str, NeutralValues]
) -> bool:
    for prefix, switch in _SWITCHES.items():
        if name.startswith(prefix):
            return not _is_neutral(given.get(switch), unsupported[switch])
    return False
