"""What is asked of a server, and what is said when it does not answer."""

import httpx
import pytest

from kvota.tools.doctor.diagnosis import diagnose
from kvota.tools.doctor.report import server_report
from kvota.tools.doctor.targets import Targets
from kvota.tools.doctor.watch import Patient, watch
from kvota.tools.server import ServerUnusable

PAGE = "kvota_requests_running 1\n"
USAGE = {
    "data": [
        {"key_id": "k1", "tenant": "a", "day": "2026-11-28", "requests": 5, "refusals": 1},
        {"key_id": "k1", "tenant": "a", "day": "2026-11-29", "requests": 2, "refusals": 2},
    ]
}


def patient(**answers: httpx.Response) -> Patient:
    """Paths are written with underscores; what is not given is 404."""

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path.strip("/").replace("/", "_")
        return answers.get(path, httpx.Response(404, json={"detail": "Not Found"}))

    client = httpx.Client(base_url="http://test", transport=httpx.MockTransport(answer))
    return Patient("http://test", None, client)


def test_a_metrics_page_alone_is_enough() -> None:
    reading = patient(metrics=httpx.Response(200, text=PAGE)).read(with_usage=True)
    assert reading.page.total("kvota_requests_running") == 1
    assert reading.not_ready is None
    assert reading.requests is None
    assert reading.usage is None


def test_why_it_is_not_ready_is_kept() -> None:
    refused = httpx.Response(503, json={"error": {"message": "The server is shutting down."}})
    reading = patient(metrics=httpx.Response(200, text=PAGE), ready=refused).read()
    assert reading.not_ready == "The server is shutting down."


def test_usage_is_summed_over_days() -> None:
    given = patient(
        metrics=httpx.Response(200, text=PAGE), admin_usage=httpx.Response(200, json=USAGE)
    )
    assert given.read().usage is None
    (usage,) = given.read(with_usage=True).usage or ()
    assert (usage.key_id, usage.requests, usage.refusals) == ("k1", 7, 3)


@pytest.mark.parametrize("body", ["[]", "{}", '{"data": [{"id": 1}]}', "nonsense"])
def test_pages_of_other_servers_at_the_same_paths_are_nothing(body: str) -> None:
    strange = httpx.Response(200, text=body)
    reading = patient(
        metrics=httpx.Response(200, text=PAGE), admin_usage=strange, admin_requests=strange
    ).read(with_usage=True)
    assert reading.requests is None
    assert reading.usage is None


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (httpx.Response(404, text="no"), "Without /metrics"),
        (httpx.Response(401, json={"error": {"message": "No key."}}), "--api-key"),
        (httpx.Response(200, text="<html><body>\n"), "no Prometheus page"),
    ],
)
def test_without_a_metrics_page_it_is_said_what_is_missing(
    response: httpx.Response, said: str
) -> None:
    with pytest.raises(ServerUnusable, match=said):
        patient(metrics=response).read()


def test_it_looks_at_the_beginning_now_and_then_and_at_the_end() -> None:
    given = patient(
        metrics=httpx.Response(200, text=PAGE), admin_usage=httpx.Response(200, json=USAGE)
    )
    now = [0.0]
    told: list[float] = []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    window = watch(given, 5.0, 2.0, told.append, sleep, lambda: now[0])
    assert told == [0.0, 2.0, 4.0]
    assert len(window.readings) == 4
    assert [one.usage is not None for one in window.readings] == [True, False, False, True]


def test_ctrl_c_makes_the_next_look_the_last() -> None:
    given = patient(
        metrics=httpx.Response(200, text=PAGE), admin_usage=httpx.Response(200, json=USAGE)
    )
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 3:
            raise KeyboardInterrupt

    window = watch(given, 60.0, 2.0, sleep=sleep, clock=lambda: now[0])
    assert window.is_cut
    assert [one.usage is not None for one in window.readings] == [True, False, True]
    report = server_report(diagnose(window, Targets()), window, {})
    assert "then interrupted" in report.facts["watched"]


def test_a_server_that_answers_once_gives_no_window() -> None:
    answers = iter([httpx.Response(200, text=PAGE)])

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/metrics":
            return httpx.Response(404)
        if (found := next(answers, None)) is None:
            raise httpx.ConnectError("refused")
        return found

    client = httpx.Client(base_url="http://test", transport=httpx.MockTransport(answer))
    now = iter(range(100))
    with pytest.raises(ServerUnusable, match="answered once and then no more: Cannot talk to"):
        watch(
            Patient("http://test", None, client), 3.0, 1.0, sleep=lambda _: None,
            clock=lambda: float(next(now)),
        )  # fmt: skip
