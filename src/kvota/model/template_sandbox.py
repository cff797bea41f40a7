"""Jinja as Hugging Face's chat templates expect it, with bounds on what a rendering may do.

A template comes with a model file and runs on every request, so it can neither reach outside its
sandbox nor hold a thread: Jinja runs in the process, and a loop cannot be interrupted from
outside. Before compiling, the syntax tree is changed so that the template pays for its own work:

    for …          one step per pass, nested loops included
    f(…)           one step per call: macros, blocks and methods too
    range(n)       n steps
    a ~ b          like +, *, **, join and replace: refused when the result would be too long

A step also looks at the thread's CPU time, which covers costly work between two steps.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jinja2 import Environment, Template, filters, nodes, pass_environment
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

STEPS_MAX = 500_000
CPU_S_MAX = 1.0
CHARS_MAX = 16_000_000  # of the output, and of any text on the way; also items of a list
EXPONENT_MAX = 64
INDENT_MAX = 16
PARTS_MAX = 10_000  # that a list is cut or filled up into

_SPEND, _JOIN = "_spend", "_join"
# They make something longer than its operands by a number in the template.
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})
_WIDE_FIELD = re.compile(r"\d{4}|%[-+ #0-9.]*\*")  # the latter: a width that is an argument
_FIELD_IN_FIELD = re.compile(r"\{[^{}]*\{")  # the same for str.format


class TooMuchWork(TemplateError):
    """The rendering passed one of the bounds above."""


class WorkBudget:
    """What one rendering may still do."""

    def __init__(
        self, steps: int = STEPS_MAX, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._steps = steps
        self._cpu_clock = cpu_clock
        self._cpu_end_s = cpu_clock() + CPU_S_MAX

    def spend(self, steps: int = 1) -> None:
        self._steps -= steps
        if self._steps < 0 or self._cpu_clock() > self._cpu_end_s:
            raise TooMuchWork("it loops too long")

    def range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self.spend(len(numbers))
        return numbers


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compile with `compile_chat`, render with `render_bounded`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, strftime_now: Callable[[str], str]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed while compiling, where no budget counts
            extensions=[LoopControlExtension, _GenerationTag],
        )
        self.filters["tojson"] = _to_json
        del self.filters["center"]
        self.filters |= {
            "indent": _indent, "format": _format, "replace": _replace, "join": _join_list,
            "batch": _batch, "slice": _slice,
        }  # fmt: skip
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = strftime_now
        self.globals[_JOIN] = _join

    def compile_chat(self, tree: nodes.Template) -> Template:
        """Compile a tree from `parse`. Raises TemplateSyntaxError."""
        _Metered().visit(tree).set_environment(self)
        return self.from_string(tree)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_length(_repeated_length(left, right))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_length(len(left) + len(right))
        elif operator == "**" and abs(right) > EXPONENT_MAX:
            raise TooMuchWork("it computes with numbers that are too large")
        elif operator == "%" and isinstance(left, str):
            _check_fields(left)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _PADDING_METHODS and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(obj, WorkBudget):
            return obj.spend()  # the short way: this runs in every pass of every loop
        budget = context.get(_SPEND)
        if isinstance(budget, WorkBudget):
            budget.spend()
        if isinstance(text := getattr(obj, "__self__", None), str):
            args = _checked(text, obj.__name__, args)
        method = getattr(obj, "__wrapped__", None)  # the sandbox wraps str.format, and only that
        if isinstance(owner := getattr(method, "__self__", None), str):
            _check_fields(owner)
        return super().call(context, obj, *args, **kwargs)


def render_bounded(template: Template, variables: Mapping[str, Any], budget: WorkBudget) -> str:
    """Render within the budget. Raises TooMuchWork, or whatever the template raises."""
    bounded = {**variables, "range": budget.range, _SPEND: budget}
    pieces, num_chars = [], 0
    for piece in template.generate(bounded):
        num_chars += len(piece)
        _check_length(num_chars)
        pieces.append(piece)
    return "".join(pieces)


class _Metered(NodeTransformer):
    """Puts a step into every loop, and makes `~` a call that can be bounded."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, _spend_statement(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call(_JOIN, node.nodes, node)


def _spend_statement(node: nodes.Node) -> nodes.ExprStmt:
    return nodes.ExprStmt(_call(_SPEND, [], node), lineno=node.lineno)


def _call(name: str, arguments: list[nodes.Expr], node: nodes.Node) -> nodes.Call:
    function = nodes.Name(name, "load", lineno=node.lineno)
    return nodes.Call(function, arguments, [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what to train on; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON as Hugging Face writes it: Jinja's own filter escapes for HTML."""
    if indent is not None and indent > INDENT_MAX:
        raise TooMuchWork(f"it indents JSON by more than {INDENT_MAX}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _join(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


def _checked(text: str, method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a text's method, once its result is known not to be too long."""
    if method == "join" and args:
        args = (list(args[0]), *args[1:])
        _check_joined(text, args[0])
    elif method == "replace" and len(args) > 1:
        _check_replaced(text, args[0], args[1])
    return args


def _check_joined(between: str, parts: list[Any]) -> None:
    _check_length(len(between) * len(parts) + sum(len(str(part)) for part in parts))


def _check_replaced(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _check_length(len(text) + text.count(old) * len(new))


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    whole, before, after = str(text), str(old), str(new)
    _check_replaced(whole, before, after)
    return whole.replace(before, after, -1 if count is None else count)


@pass_environment
def _join_list(
    environment: Environment, parts: Any, d: str = "", attribute: str | int | None = None
) -> str:
    listed = list(parts)
    if attribute is not None:
        listed = list(map(filters.make_attrgetter(environment, attribute), listed))
    _check_joined(d, listed)
    return d.join(map(str, listed))


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    size = len(width) if isinstance(width, str) else width
    if size > INDENT_MAX:
        raise TooMuchWork(f"it indents by more than {INDENT_MAX}")
    _check_length(len(text) + size * (text.count("\n") + 1))
    return filters.do_indent(text, width, first, blank)


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    _check_fields(text)
    return filters.do_format(text, *args, **kwargs)


def _batch(items: Any, linecount: int, fill_with: Any = None) -> Any:
    _check_parts(linecount)
    return filters.do_batch(items, linecount, fill_with)


def _slice(items: Any, slices: int, fill_with: Any = None) -> Any:
    _check_parts(slices)
    return filters.sync_do_slice(items, slices, fill_with)


def _check_parts(number: int) -> None:
    if number > PARTS_MAX:
        raise TooMuchWork(f"it makes more than {PARTS_MAX:,} parts of a list")


def _repeated_length(left: Any, right: Any) -> int:
    for sequence, times in ((left, right), (right, left)):
        if hasattr(sequence, "__len__") and isinstance(times, int):
            return len(sequence) * times
    return 0


def _check_length(length: int) -> None:
    if length > CHARS_MAX:
        raise TooMuchWork("it writes too much text")


def _check_fields(template: str) -> None:
    is_nested = _FIELD_IN_FIELD.search(template.replace("{{", "").replace("}}", ""))
    if is_nested or _WIDE_FIELD.search(template):
        raise TooMuchWork("it pads a text too far")
