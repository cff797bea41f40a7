"""What an operator may not set, and that the message names the field."""

from typing import Any

import pytest

from kvota.core.errors import ConfigError
from kvota.desk.settings import DeskSettings


def test_the_defaults_are_allowed() -> None:
    DeskSettings()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_running_requests": 0}, "max_running_requests"),
        ({"max_waiting_queue": -1}, "max_waiting_queue"),
        ({"long_request_threshold": 0}, "long_request_threshold"),
        ({"long_request_concurrency": 0}, "long_request_concurrency"),
        ({"preemptions_max": -1}, "preemptions_max"),
        ({"long_kv_share": 0.0}, "long_kv_share"),
        ({"long_kv_share": 1.1}, "long_kv_share"),
        ({"pause_waste_max": 1.1}, "pause_waste_max"),
        ({"pause_waste_max": -0.1}, "pause_waste_max"),
        ({"batch_floor": 1.0}, "batch_floor"),
        ({"batch_floor": -0.1}, "batch_floor"),
        ({"queue_timeout_s": 0.0}, "queue_timeout_s"),
        ({"first_token_timeout_s": 0.0}, "first_token_timeout_s"),
        ({"first_token_timeout_s": 121.0}, "first_token_timeout_s"),
        ({"long_first_token_timeout_s": 0.0}, "long_first_token_timeout_s"),
        ({"long_first_token_timeout_s": 121.0}, "long_first_token_timeout_s"),
        ({"preempt_after_s": -1.0}, "preempt_after_s"),
        ({"preempt_min_run_s": -1.0}, "preempt_min_run_s"),
        ({"risk": -1.0}, "risk"),
        ({"risk": float("nan")}, "risk"),
        ({"quantile": 1.0}, "quantile"),
        ({"tenant_weights": {"ann": 0.0}}, "ann"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DeskSettings(**fields)


@pytest.mark.parametrize(
    ("fields", "short_s", "long_s"),
    [
        ({}, None, None),
        ({"first_token_timeout_s": 3.0}, 3.0, 3.0),
        ({"first_token_timeout_s": 3.0, "long_first_token_timeout_s": 20.0}, 3.0, 20.0),
        ({"long_first_token_timeout_s": 20.0}, None, 20.0),
    ],
)
def test_a_long_prompt_may_have_its_own_limit_for_the_first_token(
    fields: dict[str, Any], short_s: float | None, long_s: float | None
) -> None:
    settings = DeskSettings(**fields)
    assert settings.first_token_limit_s(is_long=False) == short_s
    assert settings.first_token_limit_s(is_long=True) == long_s
