"""What a chat template can take, read from its syntax tree."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ContentFormat = Literal["string", "openai"]

_MAPPING_FILTERS = frozenset({"tojson", "items", "dictsort"})
_MAPPING_METHODS = frozenset({"items", "keys", "values", "get"})
_MAPPING_TESTS = frozenset({"string", "mapping"})


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """How messages must look for the template.

    `content_format`: "openai" when it loops over the parts of a message's content.
    `arguments_as_text`: it joins tool-call arguments to other text as they are.
    `handles_null_content`: it asks whether content is none.
    `knows_developer`: it mentions the developer role.
    """

    content_format: ContentFormat
    arguments_as_text: bool
    handles_null_content: bool
    knows_developer: bool


class _GenerationTag(Extension):
    """Lets `{% generation %}` blocks parse, with which templates mark the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
)


def analyze_template(source: str) -> TemplateTraits:
    """Read the traits of a template. Raises jinja2.TemplateSyntaxError."""
    tree = _ENVIRONMENT.parse(source)
    content = _Field(tree, "content")
    return TemplateTraits(
        content_format="openai" if content.is_looped_over() else "string",
        arguments_as_text=_Field(tree, "arguments").is_joined_as_text(),
        handles_null_content=content.is_compared_with_none(),
        knows_developer="developer" in source,
    )


class _Field:
    """One key of the messages, such as content, and every place in which the template uses it."""

    def __init__(self, tree: nodes.Template, key: str) -> None:
        self._tree = tree
        self._key = key
        self._aliases: set[str] = set()
        while new := set(self._find_aliases()) - self._aliases:
            self._aliases |= new

    def is_looped_over(self) -> bool:
        return any(self._is_value(loop.iter) for loop in self._tree.find_all(nodes.For))

    def is_compared_with_none(self) -> bool:
        tests = self._tree.find_all(nodes.Test)
        comparisons = self._tree.find_all(nodes.Compare)
        return any(test.name == "none" and self._is_value(test.node) for test in tests) or any(
            self._is_value(comparison.expr) and _is_none(operand.expr)
            for comparison in comparisons
            for operand in comparison.ops
        )

    def is_joined_as_text(self) -> bool:
        return self._occurs_as_text() and not self._occurs_as_mapping()

    def _occurs_as_text(self) -> bool:
        outputs = (node for output in self._tree.find_all(nodes.Output) for node in output.nodes)
        sums = (side for add in self._tree.find_all(nodes.Add) for side in (add.left, add.right))
        concats = (part for concat in self._tree.find_all(nodes.Concat) for part in concat.nodes)
        return any(self._is_value(node) for group in (outputs, sums, concats) for node in group)

    def _occurs_as_mapping(self) -> bool:
        find_all = self._tree.find_all
        filtered = any(
            item.name in _MAPPING_FILTERS and item.node is not None and self._is_value(item.node)
            for item in find_all(nodes.Filter)
        )
        tested = any(
            test.name in _MAPPING_TESTS and self._is_value(test.node)
            for test in find_all(nodes.Test)
        )
        asked = any(
            item.attr in _MAPPING_METHODS and self._is_value(item.node)
            for item in find_all(nodes.Getattr)
        )
        indexed = any(self._is_value(item.node) for item in find_all(nodes.Getitem))
        return filtered or tested or asked or indexed or self.is_looped_over()

    def _find_aliases(self) -> Iterator[str]:
        """Names that hold the field: set from it, or macro parameters that are given it."""
        for assignment in self._tree.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name) and self._is_value(assignment.node):
                yield assignment.target.name
        macros = {macro.name: macro for macro in self._tree.find_all(nodes.Macro)}
        for call in self._tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            if macro is None:
                continue
            for parameter, value in zip(macro.args, call.args, strict=False):
                if self._is_value(value):
                    yield parameter.name

    def _is_value(self, node: nodes.Node) -> bool:
        """True for the field itself, bare or with a filter or a fallback around it."""
        match node:
            case nodes.Name(name=name):
                return name in self._aliases
            case nodes.Getattr(attr=attr):
                return bool(attr == self._key)
            case nodes.Getitem(arg=nodes.Const(value=value)):
                return bool(value == self._key)
            case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=value), *_]):
                return bool(value == self._key)
            case nodes.Filter(node=nodes.Node() as inner, name=name):
                return name in ("trim", "default", "d") and self._is_value(inner)
            case nodes.CondExpr(expr1=first, expr2=second):
                return self._is_value(first) or (second is not None and self._is_value(second))
            case nodes.Or(left=left) | nodes.And(left=left):
                return self._is_value(left)
        return False


def _is_none(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and node.value is None


def syntax_error_text(error: jinja2.TemplateSyntaxError) -> str:
    """Return one line that says where a template is wrong."""
    return f"line {error.lineno}: {error.message}"
