"""Templates that would hold a thread or fill the memory, each stopped by a bound."""

from itertools import count
from typing import Any

import pytest
from jinja2.exceptions import SecurityError

from kvota.model.template_sandbox import ChatEnvironment, TooMuchWork, WorkBudget, render_bounded


def render(source: str, budget: WorkBudget | None = None, **variables: Any) -> str:
    """Without a budget: the usual steps, and a CPU clock that stands still."""
    environment = ChatEnvironment(lambda format_: format_)
    template = environment.compile_chat(environment.parse(source))
    return render_bounded(template, variables, budget or WorkBudget(cpu_clock=lambda: 0.0))


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in items %}{% for j in items %}{% for k in items %}x{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% for i in range(1000) %}{% set x = range(99999) | list %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for i in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 40 }}{% endfor %}",
        "{% for i in range(99999) if false %}{% endfor %}" * 20,
    ],
)
def test_work_without_end_is_stopped(source: str) -> None:
    budget = WorkBudget(steps=20_000, cpu_clock=lambda: 0.0)
    with pytest.raises(TooMuchWork, match="loops too long"):
        render(source, budget, items=list(range(1000)))


def test_the_usual_budget_of_steps_ends_too() -> None:
    with pytest.raises(TooMuchWork, match="loops too long"):
        render("{% for i in range(400000) %}{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s OP ns.s %}"
        "{% endfor %}".replace("OP", operator)
        for operator in ("~", "+")
    ]
    + [
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * 'a' }}",
        "{{ [0] * 10000000000 }}",
        "{{ [1] + [0] * 15999999 + [1] * 15999999 }}",
        "{% set s = 'a' * 9999999 %}{{ s }}{{ s }}",
    ],
)
def test_text_without_end_is_stopped(source: str) -> None:
    with pytest.raises(TooMuchWork, match="too much text"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 10 ** (10 ** 10) }}",
        "{{ 2 ** 1000000000 }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '{:>99999999999}'.format(1) }}",
        "{{ [1] | tojson(indent=99999999) }}",
    ],
)
def test_a_number_cannot_make_a_text_long(source: str) -> None:
    with pytest.raises(TooMuchWork):
        render(source)


@pytest.mark.parametrize("method", ["center", "ljust", "rjust", "zfill", "expandtabs"])
def test_padding_methods_are_out_of_reach(method: str) -> None:
    with pytest.raises(SecurityError):
        render("{{ 'a'." + method + "(9) }}")


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ items.append(1) }}", "{{ items.__init__.__globals__ }}"],
)
def test_the_sandbox_is_closed(source: str) -> None:
    with pytest.raises(SecurityError):
        render(source, items=[])


def test_ordinary_arithmetic_and_formatting_work() -> None:
    source = "{{ 2 ** 10 }}|{{ 'ab' * 2 }}|{{ '%03d' % 7 }}|{{ '{} {}'.format(1, 2) }}|{{ 7 % 4 }}"
    assert render(source) == "1024|abab|007|1 2|3"


def test_a_long_conversation_is_far_within_the_bounds() -> None:
    source = (
        "{% for m in items %}{% for word in m.split(' ') %}{{ word ~ ' ' }}{% endfor %}{% endfor %}"
    )
    assert len(render(source, items=["word " * 100] * 1000)) > 500_000


def test_loop_variables_still_work_in_metered_loops() -> None:
    source = (
        "{% for i in range(3) %}{{ loop.index }}{{ loop.last }}{{ loop.length }} "
        "{% else %}none{% endfor %}{% for i in [] %}{% else %}none{% endfor %}"
    )
    assert render(source) == "1False3 2False3 3True3 none"


def test_cpu_time_ends_work_whose_steps_are_few_but_costly() -> None:
    seconds = count()
    budget = WorkBudget(cpu_clock=lambda: float(next(seconds)))
    with pytest.raises(TooMuchWork):
        render("{% for i in items %}x{% endfor %}", budget, items=[1, 2, 3, 4])
