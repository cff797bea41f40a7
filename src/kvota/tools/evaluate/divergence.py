"""How far two next-token distributions are apart, when only their likeliest tokens are known.

A server tells the log probabilities of its top k tokens and of the token that really followed. So
of two servers we know both probabilities for the tokens C that both name, and of all others
together only what is left. The estimate is the divergence between the two distributions with all
others in one bucket:

    KL ≥ Σ_{t ∈ C} p(t)·ln(p(t)/q(t)) + p(rest)·ln(p(rest)/q(rest)),   p(rest) = 1 − Σ_{t ∈ C} p(t)

Merging outcomes never raises a divergence (the data-processing inequality; Cover and Thomas,
Elements of Information Theory, 2nd ed., theorem 2.7.1 and section 2.8), so this is a lower bound.
It is exact when both name the whole vocabulary. `covered`, the share of p on C, says how much of
the distribution was looked at; the bound is tight where it is near 1.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import exp, log

REST_MIN = 1e-7  # what rounding leaves of a rest that is empty
LOGPROB_MIN = -100.0  # servers write −9999 or null for zero; a higher q only lowers the bound


@dataclass(frozen=True, slots=True)
class Position:
    """What a server says about one place: the token that followed and the likeliest ones.

    Keys are token ids, or names where a server tells no ids; `top` holds `token` too.
    """

    token: Hashable
    top: Mapping[Hashable, float]  # natural logarithms

    @property
    def logprob(self) -> float:
        return max(self.top[self.token], LOGPROB_MIN)

    @property
    def likeliest(self) -> Hashable:
        return max(self.top, key=lambda key: self.top[key])


@dataclass(frozen=True, slots=True)
class Divergence:
    nats: float  # a lower bound of KL(p ‖ q)
    covered: float  # share of p on tokens that both servers named


def divergence(p: Position, q: Position) -> Divergence:
    """KL(p ‖ q) over the tokens that both name, and one bucket for all others."""
    shared = p.top.keys() & q.top.keys()
    mass_p = {key: exp(p.top[key]) for key in shared}
    covered = min(1.0, sum(mass_p.values()))
    rest_p = max(REST_MIN, 1 - sum(mass_p.values()))
    rest_q = max(REST_MIN, 1 - sum(exp(q.top[key]) for key in shared))
    nats = sum(
        mass * (max(p.top[key], LOGPROB_MIN) - max(q.top[key], LOGPROB_MIN))
        for key, mass in mass_p.items()
    )
    return Divergence(max(0.0, nats + rest_p * log(rest_p / rest_q)), covered)


def has_same_top(p: Position, q: Position) -> bool:
    """p's likeliest token is q's too, or as likely there as q's."""
    return q.top.get(p.likeliest) == q.top[q.likeliest]
