"""Filter, score, pick: who is never picked, who is preferred, and that there is no herd."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.core.errors import ConfigError
from kvota.gateway.policy.affinity import NO_PREFIX, PrefixChain, prefix_chain
from kvota.gateway.policy.routing import Choice, Replica, Router, RoutingSettings, Why

CAPACITY = 100_000
SYSTEM = prefix_chain("you are a helpful assistant " * 200)


def new_router(seed: int = 0, settings: RoutingSettings | None = None) -> Router:
    return Router(settings or RoutingSettings(), Random(seed))


def replica(id: str, usage: float = 0.0, waiting: int = 0, running: int = 0) -> Replica:
    return Replica(
        id=id,
        free_kv_tokens=round(CAPACITY * (1 - usage)),
        kv_usage=usage,
        waiting=waiting,
        running=running,
    )


def pick(
    router: Router,
    replicas: list[Replica],
    *,
    tokens: int = 1_000,
    prefix: PrefixChain = NO_PREFIX,
    conversation: str | None = None,
) -> Choice:
    choice = router.pick(replicas, ticket_tokens=tokens, prefix=prefix, conversation=conversation)
    assert choice is not None
    return choice


replicas = st.lists(
    st.builds(
        Replica,
        id=st.sampled_from("abcdefgh"),
        is_healthy=st.booleans(),
        is_draining=st.booleans(),
        can_pass=st.booleans(),
        free_kv_tokens=st.none() | st.integers(0, CAPACITY),
        running=st.integers(0, 50),
        waiting=st.integers(0, 50),
        kv_usage=st.floats(0, 1),
        latency_s=st.none() | st.floats(0, 10),
    ),
    max_size=8,
    unique_by=lambda one: one.id,
)


@settings(deadline=None)
@given(
    replicas,
    st.integers(0, 3 * CAPACITY),
    st.none() | st.text(max_size=5),
    st.booleans(),
    st.integers(),
)
def test_exactly_those_who_may_serve_are_picked(
    replicas: list[Replica], tokens: int, conversation: str | None, matches: bool, seed: int
) -> None:
    router = new_router(seed)
    if matches and replicas:
        router.sent(Choice(replicas[0], Why.LOAD, 0.0, 0.0), tokens, SYSTEM)
    able = {one.id for one in replicas if one.may_serve and one.id != "a"}
    choice = router.pick(
        replicas, ticket_tokens=tokens, prefix=SYSTEM, conversation=conversation, tried={"a"}
    )
    assert (choice is None) == (not able)
    assert choice is None or choice.replica.id in able


def test_the_emptier_replica_gets_nearly_everything_when_the_difference_is_large() -> None:
    router = new_router()
    shares = Counter(
        pick(router, [replica("full", 0.9), replica("empty", 0.1)]).replica.id for _ in range(1_000)
    )
    assert shares["empty"] > 990


def test_a_difference_within_the_error_of_the_figures_decides_little() -> None:
    router = new_router()
    shares = Counter(
        pick(router, [replica("a", 0.50), replica("b", 0.55)]).replica.id for _ in range(2_000)
    )
    assert 0.55 < shares["a"] / 2_000 < 0.7  # 1 / (1 + e^-0.5) = 0.62


def test_a_ticket_goes_where_it_fits() -> None:
    router = new_router()
    others = [replica(f"r{number}", 0.5) for number in range(7)]
    big = Replica(id="big", free_kv_tokens=4 * CAPACITY, kv_usage=0.5)
    shares = Counter(
        pick(router, [*others, big], tokens=2 * CAPACITY).replica.id for _ in range(200)
    )
    assert shares["big"] > 195


def test_a_line_weighs_like_memory() -> None:
    router = new_router()
    assert pick(router, [replica("line", 0.2, waiting=20, running=4), replica("b", 0.8)]).load < 1


def test_a_slow_replica_gets_less_at_equal_load() -> None:
    router = new_router()
    slow = replace(replica("slow", 0.3), latency_s=0.8)
    fast = replace(replica("fast", 0.3), latency_s=0.1)
    shares = Counter(pick(router, [slow, fast]).replica.id for _ in range(1_000))
    assert shares["fast"] > 900  # log2(8) · 0.1 = 0.3 of load


def test_sent_tickets_count_until_newer_figures_arrive() -> None:
    router = new_router()
    only = [replica("a", 0.5)]
    before = pick(router, only, tokens=10_000)
    router.sent(before, 10_000)
    assert pick(router, only, tokens=10_000).load == pytest.approx(before.load + 0.1)
    router.refreshed("a")
    assert pick(router, only, tokens=10_000).load == pytest.approx(before.load)


# ── no herd ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("usages", [[0.1, 0.6, 0.6, 0.6], [0.0, 0.3, 0.6, 0.9, 0.9, 0.9]])
def test_gateways_with_the_same_old_figures_do_not_all_pick_the_same_replica(
    usages: list[float],
) -> None:
    stale = [replica(f"r{number}", usage) for number, usage in enumerate(usages)]
    num_gateways = 2_000
    shares = Counter(pick(new_router(seed), stale).replica.id for seed in range(num_gateways))
    most = 2 / len(stale)
    assert max(shares.values()) / num_gateways < most + 4 * (most / num_gateways) ** 0.5


def test_with_two_replicas_alike_gateways_split() -> None:
    stale = [replica("a", 0.50), replica("b", 0.52)]
    shares = Counter(pick(new_router(seed), stale).replica.id for seed in range(1_000))
    assert min(shares.values()) > 350


def test_gateways_that_know_of_each_other_spread_a_common_prompt_between_two_probes() -> None:
    """Ten gateways, one stale picture, one prompt that all use: nobody is overloaded by it."""
    settings = RoutingSettings(num_gateways=10)
    gateways = [new_router(seed, settings) for seed in range(10)]
    stale = [replica(f"r{number}", 0.2) for number in range(4)]
    tokens = Counter[str]()
    for _ in range(10):
        for router in gateways:
            choice = pick(router, stale, tokens=1_500, prefix=SYSTEM)
            router.sent(choice, 1_500, SYSTEM)
            tokens[choice.replica.id] += round(1_500 * (1 - choice.prefix_share))
    mean = sum(tokens.values()) / 4
    assert max(tokens.values()) < 2 * mean


# ── affinity ────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_goes_back_to_where_its_beginning_was_read() -> None:
    router = new_router()
    four = [replica(f"r{number}", 0.3) for number in range(4)]
    turn = prefix_chain("a long first message " * 200)
    first = pick(router, four, prefix=turn)
    router.sent(first, 1_000, turn)
    following = prefix_chain("a long first message " * 200 + "and an answer " * 100)
    for _ in range(20):
        choice = pick(router, four, prefix=following)
        assert (choice.replica.id, choice.why) == (first.replica.id, Why.PREFIX)
        assert choice.prefix_share > 0.5


def test_tokens_that_are_already_there_take_no_room() -> None:
    router = new_router()
    one = [replica("a", 0.5)]
    cold = pick(router, one, tokens=20_000, prefix=SYSTEM)
    router.sent(cold, 20_000, SYSTEM)
    router.refreshed("a")
    warm = pick(router, one, tokens=20_000, prefix=SYSTEM)
    assert warm.load == pytest.approx(0.5 + 0.2 * (1 - warm.prefix_share))


@pytest.mark.parametrize("holder", [replica("full", 0.999), replica("line", 0.7, 1, running=40)])
def test_a_replica_without_room_is_not_followed_while_another_has_some(holder: Replica) -> None:
    router = new_router()
    some = [holder, replica("roomy", 0.7)]
    router.sent(Choice(holder, Why.LOAD, 0.0, 0.0), 0, SYSTEM)
    router.refreshed(holder.id)
    for number in range(10):
        choice = pick(router, some, tokens=25_000, prefix=SYSTEM, conversation=f"c{number}")
        assert (choice.replica.id, choice.why) == ("roomy", Why.CONVERSATION)


def test_a_restarted_replica_is_not_followed() -> None:
    router = new_router()
    four = [replica(f"r{number}", 0.3) for number in range(4)]
    first = pick(router, four, prefix=SYSTEM)
    router.sent(first, 1_000, SYSTEM)
    router.forget(first.replica.id)
    assert pick(router, four, prefix=SYSTEM).why is Why.LOAD


@settings(deadline=None)
@given(st.lists(st.floats(0, 0.99), min_size=2, max_size=8), st.integers(0, 7), st.integers(0, 9))
def test_affinity_never_picks_a_replica_above_the_guard(
    usages: list[float], holder: int, number: int
) -> None:
    settings = RoutingSettings()
    router = new_router()
    some = [replica(f"r{place}", usage) for place, usage in enumerate(usages)]
    router.sent(Choice(some[holder % len(some)], Why.LOAD, 0.0, 0.0), 0, SYSTEM)
    choice = pick(router, some, prefix=SYSTEM, conversation=f"c{number}")
    if choice.why is not Why.LOAD:
        # as if every replica had to read the whole prompt: at least what the router saw
        loads = [usage + min(1_000 / CAPACITY, 2.0) for usage in usages]
        mean = sum(loads) / len(loads)
        assert choice.load <= settings.guard_ratio * mean + settings.guard_slack + 1e-3


def test_a_prompt_that_everybody_uses_never_overloads_one_replica() -> None:
    """Live figures, 4 replicas, one system prompt; requests stay for 100 further arrivals."""
    settings, random = RoutingSettings(), Random(3)
    router = new_router(1, settings)
    held: dict[str, float] = {f"r{number}": 0.0 for number in range(4)}
    leaving: list[tuple[str, float]] = []
    worst = 0.0
    for _ in range(2_000):
        some = [replica(name, min(usage, 1.0)) for name, usage in held.items()]
        choice = pick(router, some, tokens=2_000, prefix=SYSTEM)
        used = 2_000 * (1 - choice.prefix_share) / CAPACITY + random.random() * 0.01
        router.sent(choice, 2_000, SYSTEM)
        router.refreshed(choice.replica.id)
        held[choice.replica.id] += used
        leaving.append((choice.replica.id, used))
        if len(leaving) > 100:
            name, gone = leaving.pop(0)
            held[name] -= gone
        mean = sum(held.values()) / 4
        worst = max(worst, max(held.values()) - settings.guard_ratio * mean)
    assert worst < settings.guard_slack + 0.05  # one ticket beyond the guard


# ── conversations ───────────────────────────────────────────────────────────────────────────────


def homes(some: list[Replica]) -> dict[str, str]:
    router = new_router()
    names = [f"conversation-{number}" for number in range(500)]
    return {name: pick(router, some, conversation=name).replica.id for name in names}


def test_a_conversation_has_the_same_home_on_every_gateway() -> None:
    some = [replica(f"r{number}", 0.3) for number in range(5)]
    assert homes(some) == homes(list(reversed(some)))
    assert len(set(homes(some).values())) == 5


def test_without_one_replica_only_its_conversations_move() -> None:
    some = [replica(f"r{number}", 0.3) for number in range(5)]
    before = homes(some)
    draining = [replace(one, is_draining=one.id == "r2") for one in some]
    after = homes(draining)
    assert {name for name in before if before[name] != after[name]} == {
        name for name, home in before.items() if home == "r2"
    }


def test_conversations_of_an_overloaded_home_go_to_their_second_choice() -> None:
    some = [replica(f"r{number}", 0.9 if number == 0 else 0.2) for number in range(5)]
    after = homes(some)
    before = homes([replica(f"r{number}", 0.2) for number in range(5)])
    assert "r0" not in after.values()
    assert all(after[name] == before[name] for name in before if before[name] != "r0")
    spread = Counter(after[name] for name in before if before[name] == "r0")
    assert len(spread) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [("guard_ratio", 0.9), ("uncertainty", 0.0), ("prefix_share_min", 0.0), ("num_gateways", 0)],
)
def test_senseless_settings_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        RoutingSettings(**{field: value})  # type: ignore[arg-type]
