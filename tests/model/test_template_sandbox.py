"""Templates that would hold a thread or fill the memory, each stopped by a bound."""

from itertools import count
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, UndefinedError

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
        "{% set n = namespace(d=0) %}{% block a %}{% set n.d = n.d + 1 %}{% if n.d < 40 %}"
        "{{ self.a() }}{{ self.a() }}{% endif %}{% set n.d = n.d - 1 %}{% endblock %}",
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
        "{{ ('a' * 20000) | replace('a', 'b' * 40000) }}",
        "{{ ('a' * 20000).replace('a', 'b' * 40000) }}",
        "{{ ('b' * 100000).join([''] * 20000) }}",
        "{{ ([''] * 20000) | join('b' * 100000) }}",
        "{{ ('a\\n' * 4000000) | indent(16) }}",
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
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%-.*f' % (1000000000, 1) }}",
        "{{ '{:{w}}'.format('x', w=1000000000) }}",
        "{{ '%*d' | format(1000000000, 1) }}",
        "{{ 'a' | indent(1000000000) }}",
        "{{ [1] | batch(200000000, 'x') | list }}",
        "{{ [1] | slice(20000000) | list }}",
    ],
)
def test_a_number_cannot_make_a_text_long(source: str) -> None:
    with pytest.raises(TooMuchWork):
        render(source)


@pytest.mark.parametrize("method", ["center", "ljust", "rjust", "zfill", "expandtabs"])
def test_padding_methods_are_out_of_reach(method: str) -> None:
    with pytest.raises(SecurityError):
        render("{{ 'a'." + method + "(9) }}")


def test_numbers_have_no_bytes_and_nobody_makes_up_a_text() -> None:
    with pytest.raises(SecurityError):
        render("{{ (1).to_bytes(1000000000, 'big') }}")
    with pytest.raises(UndefinedError, match="lipsum"):
        render("{{ lipsum(n=30000) }}")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a-b-a' | replace('a', 'c') }} {{ 'a-a' | replace('a', 'c', 1) }}", "c-b-c c-a"),
        ("{{ 'a-b'.replace('a', 'c') }} {{ 'a-a'.replace('a', 'c', 1) }}", "c-b c-a"),
        ("{{ [1, 'b'] | join(', ') }} {{ ['a'] | join }}", "1, b a"),
        ("{{ items | join('/', attribute='name') }}", "x/y"),
        ("{{ ', '.join(items | map(attribute='name')) }}", "x, y"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ '%s-%03d' | format('a', 7) }}", "a-007"),
        ('{{ \'{{"name": "{}"}}\'.format(1) }}', '{"name": "1"}'),
        ("{{ [1, 2, 3] | batch(2, 0) | list }}", "[[1, 2], [3, 0]]"),
        ("{{ [1, 2, 3] | slice(2) | list }}", "[[1, 2], [3]]"),
    ],
)
def test_what_is_bounded_does_what_jinja_does(source: str, text: str) -> None:
    assert render(source, items=[{"name": "x"}, {"name": "y"}]) == text


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
