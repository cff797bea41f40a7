"""What a prompt asks for, so that the model name `auto` can mean a different model for each task.

    Prompt ──▶ Classifier ──▶ Classified(task, score, why)

The rules are data (`tasks.toml`, or the operator's own file). A rule is one sign of one task with
a weight; a sign counts once, however often it is seen. Kinds of signs:

    words     any of these, as whole words in English and anywhere in Chinese ("sql", "存储过程")
    orders    any of these sequences of words, in this order and close together ("select … from")
    shapes    any of these structural hints (code fence, traceback, long text, …: `Shape`)

    score(task) = Σ over its rules of  weight · max over the texts of ( text weight, if it fits )

The texts are the last user message, earlier user messages and the system prompt, with weights of
their own: "now do it in Rust" gets its meaning from what came before. The highest score wins if it
reaches the task's `at_least`; the first in the file wins a tie; otherwise the task is `default`.

Matching is linear in the text: there are no regular expressions in rules. A text is made into words
once (`texts.py`), of a long one only both ends. A sign is looked for only where all its words are
there, and an order from at most 32 places of its first piece, `GAP_MAX` characters further each.

To replace all this, name a Python entry point of the group `kvota.classifiers`; it has to give an
object with the method of `Classifier`.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from kvota.core.errors import ConfigError
from kvota.gateway.policy.texts import GAP_MARK, Order, SeenText, Shape, Sign, pieces_of

ENTRY_POINT_GROUP: Final = "kvota.classifiers"
SHIPPED_RULES: Final = "tasks.toml"  # beside this module, as package data

_READ_MAX: Final = 2_000  # characters from the beginning of the last message, and from its end
_READ_BESIDE_MAX: Final = 500  # of earlier messages and of the system prompt
_EARLIER_MAX: Final = 4  # earlier user messages that are looked at
_RULES_MAX: Final = 500
_SIGNS_MAX: Final = 500  # of one rule


@dataclass(frozen=True, slots=True)
class Prompt:
    """The texts of one request. `turns`: what the user said, oldest first."""

    turns: tuple[str, ...]
    system: str = ""


@dataclass(frozen=True, slots=True)
class Classified:
    """`why`: names of the rules that counted, for the log."""

    task: str
    score: float = 0.0
    why: tuple[str, ...] = ()


class Classifier(Protocol):
    """Chooses the task of a prompt. Called on the event loop: it must not block."""

    def classify(self, prompt: Prompt) -> Classified: ...


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    task: str
    weight: float
    words: tuple[str, ...] = ()
    orders: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()

    @property
    def num_signs(self) -> int:
        return len(self.words) + len(self.orders) + len(self.shapes)


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of rules. `tasks`: each task and the score it needs."""

    default: str
    tasks: Mapping[str, float]
    rules: tuple[Rule, ...]
    earlier_weight: float = 0.4
    system_weight: float = 0.5


def load_rules(text: str, source: str) -> Rules:
    """Rules from TOML. Raises ConfigError that names `source` and what is wrong with it."""
    try:
        rules = msgspec.convert(tomllib.loads(text), Rules)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{source}: {error}.") from error
    problem = next(_problems(rules), None)
    if problem is not None:
        raise ConfigError(f"{source}: {problem}.")
    return rules


def _problems(rules: Rules) -> Iterator[str]:
    if len(rules.rules) > _RULES_MAX:
        yield f"there are {len(rules.rules)} rules; the limit is {_RULES_MAX}"
    for rule in rules.rules:
        where = f"rule {rule.name!r}"
        if rule.task not in rules.tasks:
            yield f"{where} is for task {rule.task!r}, which [tasks] does not have"
        if not math.isfinite(rule.weight):
            yield f"{where} has the weight {rule.weight}"
        if not 1 <= rule.num_signs <= _SIGNS_MAX:
            yield f"{where} has {rule.num_signs} signs; it needs 1 to {_SIGNS_MAX}"
        for written in (*rule.words, *(one for order in rule.orders for one in pieces_of(order))):
            if not Sign.of(written).text:
                yield f"{where} has a sign without any word in it: {written!r}"
        for order in rule.orders:
            if len(pieces_of(order)) < 2:
                yield f"{where}: the order {order!r} needs {GAP_MARK!r} between two pieces"


@dataclass(frozen=True, slots=True)
class _Signs:
    """A rule made ready: its signs by a part that a text must have before one is looked for."""

    rule: Rule
    by_part: Mapping[str, tuple[Sign | Order, ...]]

    @classmethod
    def of(cls, rule: Rule) -> "_Signs":
        by_part: dict[str, tuple[Sign | Order, ...]] = {}
        signs: list[Sign | Order] = [Sign.of(word) for word in rule.words]
        signs += [Order.of(order) for order in rule.orders]
        for sign in signs:
            by_part[sign.rarest] = (*by_part.get(sign.rarest, ()), sign)
        return cls(rule, by_part)

    def fit(self, seen: SeenText) -> bool:
        return not seen.shapes.isdisjoint(self.rule.shapes) or any(
            seen.has(sign)
            for part in self.by_part.keys() & seen.parts
            for sign in self.by_part[part]
        )


class RuleClassifier:
    """The classifier that the rules describe. Stateless; a few milliseconds at most."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._signs = tuple(_Signs.of(rule) for rule in rules.rules)

    @property
    def tasks(self) -> frozenset[str]:
        """All that it may answer."""
        return frozenset((*self._rules.tasks, self._rules.default))

    def classify(self, prompt: Prompt) -> Classified:
        texts = self._weighted(prompt)
        scores: dict[str, float] = {}
        why: dict[str, list[str]] = {}
        for signs in self._signs:
            rule = signs.rule
            share = max((weight for weight, seen in texts if signs.fit(seen)), default=0.0)
            if share > 0:
                scores[rule.task] = scores.get(rule.task, 0.0) + rule.weight * share
                why.setdefault(rule.task, []).append(rule.name)
        reached = [
            task for task, needed in self._rules.tasks.items() if scores.get(task, 0.0) >= needed
        ]
        if not reached:
            return Classified(self._rules.default)
        best = max(reached, key=lambda task: scores.get(task, 0.0))
        return Classified(best, scores.get(best, 0.0), tuple(why.get(best, ())))

    def _weighted(self, prompt: Prompt) -> list[tuple[float, SeenText]]:
        rules = self._rules
        *earlier, last = prompt.turns or ("",)
        beside = [(rules.system_weight, prompt.system)]
        beside += [(rules.earlier_weight, turn) for turn in earlier[-_EARLIER_MAX:]]
        return [(1.0, SeenText.of(last, _READ_MAX))] + [
            (weight, SeenText.of(text, _READ_BESIDE_MAX)) for weight, text in beside if text
        ]
