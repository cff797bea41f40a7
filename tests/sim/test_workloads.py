from collections import Counter
from random import Random
from statistics import fmean

import pytest

from kvota.sim.workloads import flood, merged, team_mix, with_tenants
from kvota.traffic.arrival import Arrival


def test_the_team_mix_is_what_it_says() -> None:
    arrivals = list(team_mix(Random(2), rate_rps=10.0, duration_s=1000.0))
    assert len(arrivals) == pytest.approx(10_000, rel=0.03)
    long = [one for one in arrivals if one.tenant == "long"]
    short = [one for one in arrivals if one.tenant == "short"]
    assert len(long) / len(arrivals) == pytest.approx(0.08, abs=0.01)
    assert {one.prompt_tokens for one in short} == set(range(32, 193))
    assert min(one.prompt_tokens for one in long) >= 1500
    assert max(one.prompt_tokens for one in long) <= 3000
    assert fmean(one.output_tokens for one in short) == pytest.approx(40, rel=0.03)
    assert all(one.max_tokens == one.output_tokens for one in arrivals)


def test_streams_are_merged_by_time() -> None:
    def stream(tenant: str, rate_rps: float) -> list[Arrival]:
        return list(
            flood(
                Random(1), tenant=tenant, rate_rps=rate_rps, duration_s=100.0, prompt=(1, 9),
                output=(1, 9), max_tokens=9,
            )
        )  # fmt: skip

    both = merged(iter(stream("loud", 10.0)), iter(stream("quiet", 1.0)))
    assert [one.at_s for one in both] == sorted(one.at_s for one in both)
    counts = Counter(one.tenant for one in both)
    assert counts["loud"] / counts["quiet"] == pytest.approx(10, rel=0.4)


def test_tenants_are_as_unequal_as_servegens() -> None:
    plain = [Arrival(at_s=0.0, prompt_tokens=1, output_tokens=1, max_tokens=1)] * 50_000
    counts = Counter(one.tenant for one in with_tenants(plain, Random(3)))
    shares = [count / 50_000 for _, count in counts.most_common()]
    assert shares[0] == pytest.approx(0.286, abs=0.01)
    assert sum(shares[:25]) == pytest.approx(0.901, abs=0.01)
    assert len(shares) == 73
