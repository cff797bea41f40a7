"""The shipped rules against labelled prompts, and rules of one's own."""

from collections.abc import Iterable
from importlib.resources import files

import pytest

from kvota.core.errors import ConfigError
from kvota.gateway.policy.tasks import (
    SHIPPED_RULES,
    Classified,
    Classifier,
    Prompt,
    RuleClassifier,
    load_rules,
)
from tests.gateway.policy.labelled_prompts import DECOYS, FRESH, KNOWN, Labelled

SHIPPED = load_rules(
    files("kvota.gateway.policy").joinpath(SHIPPED_RULES).read_text("utf-8"), SHIPPED_RULES
)
OWN = """
default = "chat"
earlier_weight = 0.5
system_weight = 0.25
[tasks]
law = 1.0
tax = 1.0
[[rules]]
name = "law"
task = "law"
weight = 2.0
words = ["contract", "合同"]
[[rules]]
name = "tax"
task = "tax"
weight = 2.0
orders = ["pay … tax"]
shapes = ["percent"]
"""


@pytest.fixture(scope="module")
def shipped() -> Classifier:
    return RuleClassifier(SHIPPED)


@pytest.fixture(scope="module")
def own() -> Classifier:
    return RuleClassifier(load_rules(OWN, "own.toml"))


def prompt_of(text: str | tuple[str, ...]) -> Prompt:
    return Prompt((text,) if isinstance(text, str) else text)


def wrong(classifier: Classifier, prompts: Iterable[Labelled]) -> list[tuple[str, str, str]]:
    """(wanted, got, text) of every prompt that was taken for something else."""
    found = [
        (task, classifier.classify(prompt_of(text)).task, str(text)[:60]) for task, text in prompts
    ]
    return [one for one in found if one[0] != one[1]]


# ── the shipped rules ───────────────────────────────────────────────────────────────────────────


def test_there_are_prompts_of_every_task_in_both_languages() -> None:
    for task in SHIPPED.tasks:
        of_task = [str(text) for label, text in (*KNOWN, *FRESH) if label == task]
        assert sum(text.isascii() for text in of_task) >= 10
        assert sum(any("一" <= sign <= "鿿" for sign in text) for text in of_task) >= 10


def test_known_prompts_keep_their_task(shipped: Classifier) -> None:
    assert wrong(shipped, KNOWN) == []


def test_most_prompts_that_the_rules_never_saw_get_their_task(shipped: Classifier) -> None:
    missed = wrong(shipped, FRESH)
    assert 1 - len(missed) / len(FRESH) >= 0.75, missed


def test_a_prompt_that_is_not_understood_is_chat_and_nothing_else(shipped: Classifier) -> None:
    assert {got for _, got, _ in wrong(shipped, FRESH)} == {"chat"}


@pytest.mark.parametrize("text", DECOYS)
def test_ordinary_talk_in_the_words_of_programmers_is_chat(shipped: Classifier, text: str) -> None:
    assert shipped.classify(Prompt((text,))).task == "chat"


def test_no_text_at_all_is_chat(shipped: Classifier) -> None:
    assert shipped.classify(Prompt(())) == Classified("chat")
    assert shipped.classify(Prompt(("",), system="")) == Classified("chat")


def test_a_huge_hostile_prompt_is_read_within_its_bounds(shipped: Classifier) -> None:
    for text in ("if " * 300_000, "select " * 150_000, "你" * 500_000, "{" * 500_000):
        assert shipped.classify(Prompt((text,) * 8, system=text)).task in SHIPPED.tasks


# ── how rules are read ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (Prompt(("Read my contract",)), Classified("law", 2.0, ("law",))),
        (Prompt(("看一下合同",)), Classified("law", 2.0, ("law",))),
        (Prompt(("Must I pay this tax?",)), Classified("tax", 2.0, ("tax",))),
        (Prompt(("Is 3% of it right?",)), Classified("tax", 2.0, ("tax",))),
        (Prompt(("Hello",)), Classified("chat")),
        (Prompt(("My contract and your contract",)), Classified("law", 2.0, ("law",))),
        (Prompt(("contract", "Hello")), Classified("law", 1.0, ("law",))),
        (Prompt(("contract", "contract", "Hello")), Classified("law", 1.0, ("law",))),
        (Prompt(("Hello",), system="You read a contract"), Classified("chat")),
        (Prompt(("contract", "pay my tax")), Classified("tax", 2.0, ("tax",))),
        (Prompt(("A contract to pay tax",)), Classified("law", 2.0, ("law",))),
        (Prompt(("contract", *["Hello"] * 5)), Classified("chat")),
    ],
)
def test_the_heaviest_text_counts_and_the_first_task_wins_a_tie(
    own: Classifier, prompt: Prompt, expected: Classified
) -> None:
    assert own.classify(prompt) == expected


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("default", "defalt", "defalt"),
        ("law = 1.0", "law = 'much'", "float"),
        ('task = "tax"', 'task = "taxes"', "'taxes'"),
        ('shapes = ["percent"]', 'shapes = ["round"]', "round"),
        ('"pay … tax"', '"pay tax"', "needs '…' between two"),
        ('"contract"', '"?!"', "without any word"),
        ('words = ["contract", "合同"]', "", "0 signs"),
        ("weight = 2.0", "weight = inf", "weight inf"),
        ("[tasks]", "[tasks", "own.toml"),
    ],
)
def test_wrong_rules_are_refused_with_their_file_and_reason(
    old: str, new: str, problem: str
) -> None:
    assert old in OWN
    with pytest.raises(ConfigError, match=r"^own\.toml") as refused:
        load_rules(OWN.replace(old, new, 1), "own.toml")
    assert problem in refused.value.message
