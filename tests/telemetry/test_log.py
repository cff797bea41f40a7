import io
import json

from kvota.telemetry.log import new_log


def test_a_line_is_one_json_object_with_time_and_level() -> None:
    stream = io.StringIO()
    new_log(stream).info("request", outcome="completed", total_s=0.5)
    new_log(stream).error("broken", text="two\nlines")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["event"] == "request"
    assert first["level"] == "info"
    assert first["total_s"] == 0.5
    assert first["timestamp"].endswith("Z")
    assert second["text"] == "two\nlines"


def test_an_error_carries_its_traceback_on_the_same_line() -> None:
    stream = io.StringIO()
    try:
        raise RuntimeError("deep down")
    except RuntimeError as error:
        new_log(stream).error("engine died", exc_info=error)
    [line] = stream.getvalue().splitlines()
    assert "deep down" in json.loads(line)["exception"]
