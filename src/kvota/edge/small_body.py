"""The body of a small request, for pages that are not worth an Exchange: bounded all the same."""

import asyncio
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from kvota.core.errors import BodyTooLarge, ClientClosed, InvalidRequest

BYTES_MAX: Final = 64 * 1024
TIMEOUT_S: Final = 30.0


async def small_body(
    request: HttpRequest, *, bytes_max: int = BYTES_MAX, timeout_s: float = TIMEOUT_S
) -> bytes:
    """All of it. Raises BodyTooLarge, InvalidRequest when it does not come, ClientClosed."""
    content = b""
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                content += part
                if len(content) > bytes_max:
                    raise BodyTooLarge(f"The body is over the limit of {bytes_max} bytes.")
    except TimeoutError:
        raise InvalidRequest(f"The body did not arrive within {timeout_s:g} s.") from None
    except ClientDisconnect:
        raise ClientClosed("The client went away before its request was complete.") from None
    return content
