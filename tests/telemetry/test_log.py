import io
import json
from concurrent.futures import ThreadPoolExecutor

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


def test_what_json_does_not_know_is_written_as_it_shows_itself() -> None:
    stream = io.StringIO()
    new_log(stream).warning("odd", what=KeyError("x"), half="a\ud800b", nowhere=float("nan"))
    [line] = stream.getvalue().splitlines()
    assert json.loads(line)["half"] == "a\ud800b"
    new_log(stream).warning("odd", what=KeyError("x"), nowhere=float("nan"))
    written = json.loads(stream.getvalue().splitlines()[1])
    assert written["what"] == "KeyError('x')"
    assert written["nowhere"] is None


def test_lines_of_many_threads_stay_whole() -> None:
    stream = io.StringIO()
    log = new_log(stream)

    def say(number: int) -> None:
        for _ in range(50):
            log.info("request", number=number)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(say, range(4)))
    numbers = [json.loads(line)["number"] for line in stream.getvalue().splitlines()]
    assert sorted(numbers) == sorted([*range(4)] * 50)
