"""The official SDK's clients, on a transport with patience."""

from typing import Any

import httpx2
import openai

from kvota.client.patience import Patience
from kvota.client.transport import AsyncPatientTransport, PatientTransport


def connect(
    base_url: str,
    *,
    api_key: str = "unused",
    patience: Patience | None = None,
    fallback_model: str | None = None,
    **sdk: Any,
) -> openai.OpenAI:
    """An `openai.OpenAI`. `sdk` goes to it as it is; its own retries are off.

    A `timeout`, here or of one request, counts instead of what `patience` says.

    `fallback_model` is asked once when the model that was wanted stays refused or fails.
    """
    chosen = patience or Patience()
    transport = PatientTransport(httpx2.HTTPTransport(), chosen, fallback_model=fallback_model)
    http = httpx2.Client(transport=transport, timeout=chosen.unsaid_s)
    return openai.OpenAI(base_url=base_url, api_key=api_key, http_client=http, max_retries=0, **sdk)


def connect_async(
    base_url: str,
    *,
    api_key: str = "unused",
    patience: Patience | None = None,
    fallback_model: str | None = None,
    **sdk: Any,
) -> openai.AsyncOpenAI:
    """An `openai.AsyncOpenAI`, as `connect`."""
    chosen = patience or Patience()
    transport = AsyncPatientTransport(
        httpx2.AsyncHTTPTransport(), chosen, fallback_model=fallback_model
    )
    http = httpx2.AsyncClient(transport=transport, timeout=chosen.unsaid_s)
    return openai.AsyncOpenAI(
        base_url=base_url, api_key=api_key, http_client=http, max_retries=0, **sdk
    )
