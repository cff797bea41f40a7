"""What holds for every test."""

from hypothesis import HealthCheck, settings

# The same tree has the same verdict: examples are drawn from each test's own text. Others are
# looked for by `pytest -m hypothesis --hypothesis-profile=explore`. No test depends on how fast
# the machine is, so no example is timed. A failure prints its replay.
settings.register_profile(
    "kvota",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize=True,
)
settings.register_profile("explore", settings.get_profile("kvota"), derandomize=False)
settings.load_profile("kvota")
