"""Looking at a running server every few seconds, over HTTP, without asking it for work.

/metrics           needed; everything else may be missing
/ready             why it takes no work
/admin/requests    where every request is, and what it waits for      (an operator's key)
/admin/usage       which key asks how much; the first and the last look only
"""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import msgspec

from kvota.tools.doctor.page import Page
from kvota.tools.doctor.window import KeyUsage, Reading, Window
from kvota.tools.server import (
    ServerUnusable,
    authorization,
    connection_text,
    error_text,
    message_of,
    root_of,
)
from kvota.wire.requests import LiveRequest, LiveRequestList

TIMEOUT_S = 5.0


class Patient:
    """One server. Use it in a `with`."""

    def __init__(self, url: str, api_key: str | None, client: httpx.Client | None = None) -> None:
        """`client` only where a test brings its own."""
        self._client = client or httpx.Client(
            base_url=root_of(url),
            headers=authorization(api_key),
            timeout=TIMEOUT_S,
            trust_env=False,  # what is examined is near; a proxy would be examined with it
        )

    def __enter__(self) -> "Patient":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def read(self, *, with_usage: bool = False) -> Reading:
        """One look. Raises ServerUnusable where there is no metrics page."""
        at_s = time.monotonic()
        try:
            page = self._page()
            return Reading(
                at_s=at_s,
                page=page,
                not_ready=self._not_ready(),
                requests=self._requests(),
                usage=self._usage() if with_usage else None,
            )
        except httpx.HTTPError as error:
            raise ServerUnusable(connection_text(self._client.base_url, error)) from error

    def _page(self) -> Page:
        response = self._client.get("/metrics")
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise ServerUnusable(f"{error_text(response)} Give an operator's key with --api-key.")
        if not response.is_success:
            raise ServerUnusable(
                f"{error_text(response)} Without /metrics there is nothing to see."
            )
        try:
            return Page.parse(response.text)
        except ValueError as error:
            raise ServerUnusable(f"{response.url} is no Prometheus page: {error}.") from error

    def _not_ready(self) -> str | None:
        response = self._client.get("/ready")
        is_refusal = response.status_code == httpx.codes.SERVICE_UNAVAILABLE
        return message_of(response) if is_refusal else None

    def _requests(self) -> tuple[LiveRequest, ...] | None:
        response = self._client.get("/admin/requests")
        if not response.is_success:
            return None
        try:
            return tuple(msgspec.json.decode(response.content, type=LiveRequestList).data)
        except msgspec.MsgspecError:
            return None

    def _usage(self) -> tuple[KeyUsage, ...] | None:
        """Of yesterday and today: a window may cross midnight."""
        since = (datetime.now(UTC) - timedelta(days=1)).date().isoformat()
        response = self._client.get("/admin/usage", params={"since": since})
        if not response.is_success:
            return None
        try:
            rows = response.json()["data"]
            return tuple(_summed(rows).values())
        except (ValueError, KeyError, TypeError):
            return None


def watch(
    patient: Patient,
    seconds: float,
    every_s: float,
    told: Callable[[float], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Window:
    """Look now, every `every_s`, and after `seconds`. `told` hears how many have gone.

    Raises ServerUnusable when the first look fails, or no other succeeds. A later look that fails
    is part of the picture. Ctrl-C after the first look makes the next one the last.
    """
    began_s = clock()
    readings = [patient.read(with_usage=True)]
    is_cut = False
    while not is_cut and (gone_s := clock() - began_s) < seconds:
        told(gone_s)
        try:
            sleep(min(every_s, seconds - gone_s))
        except KeyboardInterrupt:
            is_cut = True
        readings.append(_look(patient, with_usage=is_cut or clock() - began_s >= seconds))
    if sum(one.error is None for one in readings) < 2:
        raise ServerUnusable(f"It answered once and then no more: {readings[-1].error}")
    return Window(readings, is_cut)


def _look(patient: Patient, *, with_usage: bool) -> Reading:
    """A look that failed says why."""
    try:
        return patient.read(with_usage=with_usage)
    except ServerUnusable as failed:
        return Reading(at_s=time.monotonic(), page=Page(), error=failed.message)


def _summed(rows: list[Mapping[str, Any]]) -> dict[str, KeyUsage]:
    """One line for each key, over days and models."""
    keys: dict[str, KeyUsage] = {}
    for row in rows:
        name = str(row["key_id"])
        old = keys.get(name)
        keys[name] = KeyUsage(
            key_id=name,
            tenant=str(row["tenant"]),
            requests=int(row["requests"]) + (old.requests if old else 0),
            refusals=int(row["refusals"]) + (old.refusals if old else 0),
        )
    return keys
