"""Messages to prompt text by the model's chat template, as transformers renders it."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import jinja2

from octavo.engine.core.errors import ConfigurationError, InvalidRequestError
from octavo.engine.tokenizer import ChatTemplates, Tokenizer
from octavo.server.template_analysis import (
    ContentFormat,
    TemplateTraits,
    analyze_template,
    syntax_error_text,
)

_ROLES = ("developer", "system", "user", "assistant", "tool")
_RENDERER_NAMES = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "self"),
        *("conversations", "chat_template", "return_assistant_tokens_mask"),
    }
)
"""Names that a request's template variables may not take."""
_TEMPLATE_FAULTS = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    MemoryError,
)
"""What a template may raise by itself when the messages are not what it expects."""
_MAX_MESSAGE_CHARS = 1000


class ChatTemplate:
    """Renders conversations; may be used from any thread.

    Of several templates by name, `default` is used, and `tool_use` for conversations with tools.
    """

    def __init__(
        self,
        templates: ChatTemplates,
        tokenizer: Tokenizer,
        content_format: Literal["auto", "string", "openai"] = "auto",
    ) -> None:
        """Raises ConfigurationError for a template that is not valid Jinja."""
        self._names: tuple[str, ...] = ()
        self._for_tools: ChatTemplate | None = None
        template_source = templates if isinstance(templates, str) else None
        if isinstance(templates, Mapping):
            self._names = tuple(sorted(templates))
            template_source = templates.get("default")
            if "tool_use" in templates:
                self._for_tools = ChatTemplate(templates["tool_use"], tokenizer, content_format)
        self._source = template_source
        self._special_tokens = dict(tokenizer.special_tokens)
        self._traits: TemplateTraits | None = None
        if template_source is not None:
            self._traits = _analyze(template_source)
        self._forced_format: ContentFormat | None = (
            None if content_format == "auto" else content_format
        )

    @property
    def source(self) -> str | None:
        """The template's text; None for a model without one."""
        return self._source

    @property
    def content_format(self) -> ContentFormat:
        """Whether messages reach the template with their content as a string or as parts."""
        if self._forced_format is not None:
            return self._forced_format
        return "string" if self._traits is None else self._traits.content_format

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text.

        `kwargs` are further template variables. With `continue_final_message` the text ends where
        the last message does, so that the model goes on with it.
        Raises InvalidRequestError naming the field at fault.
        """
        if tools and self._for_tools is not None:
            return self._for_tools.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=kwargs,
            )
        if self._source is None or self._traits is None:
            _refuse(self._missing_text())
        variables = self._variables(kwargs or {})
        shaped = [self._shape(place, message) for place, message in enumerate(messages)]
        if not shaped:
            _refuse("messages must not be empty")
        if continue_final_message:
            _check_continuation(shaped, add_generation_prompt)
        # Slow to import, and the server listens before it loads a model with its tokenizer.
        from transformers.utils.chat_template_utils import (  # noqa: PLC0415
            render_jinja_template,
        )

        try:
            rendered, _ = render_jinja_template(
                conversations=[shaped],
                tools=None if not tools else [dict(tool) for tool in tools],
                chat_template=self._source,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except jinja2.TemplateError as error:
            reason = (error.message or "the chat template failed")[:_MAX_MESSAGE_CHARS]
            raise InvalidRequestError(reason, "messages") from error
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequestError(_fault_text(continue_final_message), "messages") from error
        return _check_text(rendered[0])

    def _missing_text(self) -> str:
        if self._names:
            return (
                f"the model has several chat templates ({', '.join(self._names)}) and none is its "
                "default; start the server with --chat-template and one of these names"
            )
        return (
            "the model has no chat template; use /v1/completions, or start the server with "
            "--chat-template"
        )

    def _variables(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        taken = sorted(_RENDERER_NAMES & kwargs.keys())
        if taken:
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {', '.join(taken)}", "chat_template_kwargs"
            )
        return self._special_tokens | dict(kwargs)

    def _shape(self, place: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message as the template can take it; fields that are null count as absent."""
        assert self._traits is not None
        where = f"messages[{place}]"
        shaped = {name: value for name, value in message.items() if value is not None}
        role = shaped.get("role")
        if role not in _ROLES:
            _refuse(f"{where}.role must be one of {', '.join(_ROLES)}")
        if role == "developer" and not self._traits.knows_developer:
            shaped["role"] = "system"
        if role == "tool" and not isinstance(shaped.get("tool_call_id"), str):
            _refuse(f"{where}.tool_call_id is needed in a tool message")
        shaped["content"] = self._shape_content(where, role, shaped.get("content"))
        thought = shaped.get("reasoning", shaped.get("reasoning_content"))
        if role == "assistant" and thought is not None:
            # Templates know it by the one name or by the other.
            shaped |= {"reasoning": thought, "reasoning_content": thought}
        if not shaped.get("tool_calls"):
            shaped.pop("tool_calls", None)
        else:
            shaped["tool_calls"] = self._shape_calls(where, shaped["tool_calls"])
        return shaped

    def _shape_content(
        self, where: str, role: str, content: object
    ) -> str | list[dict[str, Any]] | None:
        assert self._traits is not None
        if content is None or content == []:
            if role != "assistant":
                _refuse(f"{where}.content must not be empty")
            if self._traits.handles_null_content:
                return None
            return [] if self.content_format == "openai" else ""
        if isinstance(content, str):
            as_parts = self.content_format == "openai"
            return [{"type": "text", "text": content}] if as_parts else content
        if not isinstance(content, list):
            _refuse(f"{where}.content must be a string or a list of parts")
        parts = [_check_part(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
        return parts if self.content_format == "openai" else "\n".join(p["text"] for p in parts)

    def _shape_calls(self, where: str, calls: object) -> list[dict[str, Any]]:
        if not isinstance(calls, list):
            _refuse(f"{where}.tool_calls must be a list")
        return [self._shape_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]

    def _shape_call(self, where: str, call: object) -> dict[str, Any]:
        assert self._traits is not None
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            _refuse(f"{where} must be a function call")
        arguments = function.get("arguments")
        parsed = _parse_arguments(f"{where}.function.arguments", arguments)
        value: Any = parsed
        if self._traits.arguments_as_text:
            value = arguments if isinstance(arguments, str) and arguments else json.dumps(parsed)
        return {**call, "function": {**function, "arguments": value}}


def _analyze(source: str) -> TemplateTraits:
    try:
        return analyze_template(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigurationError(
            f"the chat template is not valid Jinja ({syntax_error_text(error)}); "
            "name another one with --chat-template"
        ) from error


def _check_part(where: str, part: object) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        _refuse(f"{where} must be an object with a type")
    if kind != "text":
        _refuse(f"{where}.type must be text: the model takes no other kind of content")
    if not isinstance(part.get("text"), str):
        _refuse(f"{where}.text must be a string")
    return dict(part)


def _parse_arguments(where: str, arguments: object) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or arguments == "":
        return {}
    try:
        if isinstance(arguments, str):
            value = json.loads(arguments, parse_constant=_not_finite, parse_float=_finite)
            if isinstance(value, dict):
                return value
    except (ValueError, RecursionError):
        pass
    _refuse(f"{where} must be the JSON text of an object")


def _not_finite(name: str) -> NoReturn:
    raise ValueError(name)


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _not_finite(number)


def _check_continuation(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message needs add_generation_prompt: false", "continue_final_message"
        )
    if messages[-1]["role"] != "assistant":
        raise InvalidRequestError(
            "continue_final_message needs a last message of the assistant", "continue_final_message"
        )


def _fault_text(continue_final_message: bool) -> str:
    if continue_final_message:
        return "the chat template does not let the last message be continued"
    return "the chat template cannot render these messages"


def _check_text(text: str) -> str:
    # Escapes inside JSON text, such as tool-call arguments, come out only here.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("messages hold a lone surrogate", "messages") from error
    return text


def _refuse(message: str) -> NoReturn:
    raise InvalidRequestError(message, "messages")
