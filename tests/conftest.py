"""What holds for every test."""

from hypothesis import HealthCheck, settings

# No test depends on how fast the machine is, so no example is timed. A failure prints its replay.
settings.register_profile(
    "kvota", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("kvota")
