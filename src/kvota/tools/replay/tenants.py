"""Which tenant of a trace asks with which API key.

The file is TOML: a name and its key a line, and "*" for everybody who is not named.

    client-17 = "sk-…"
    "*" = "sk-…"
"""

import tomllib
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from kvota.core.errors import ConfigError
from kvota.tools.load.asked import Asked, Seen
from kvota.tools.load.sender import Sender
from kvota.tools.load.target import Target

ANYBODY = "*"


def read_keys(path: Path) -> dict[str, str]:
    """Keys by tenant. Raises ConfigError; no message holds a key."""
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: keys cannot be read: {error}.") from None
    except tomllib.TOMLDecodeError:
        raise ConfigError(
            f'{path} is not TOML. Write one tenant a line: name = "key", and "*" for all others.'
        ) from None
    for tenant, key in content.items():
        if not isinstance(key, str) or not key:
            raise ConfigError(f"{path}: the key of {tenant} must be a text that is not empty.")
    return content


def keys_for(
    tenants: Iterable[str], keys: Mapping[str, str], api_key: str | None
) -> dict[str, str | None]:
    """The key of each tenant. Raises ConfigError naming those that have none."""
    fallback = keys.get(ANYBODY, api_key)
    found = {tenant: keys.get(tenant, fallback) for tenant in tenants}
    missing = sorted(tenant for tenant, key in found.items() if key is None)
    if keys and missing:
        named = ", ".join(missing[:5]) + (" …" if len(missing) > 5 else "")
        raise ConfigError(
            f"{len(missing)} tenants of the trace have no key: {named}. Name them in the file of "
            f'keys, or give "{ANYBODY}" one for all others.'
        )
    return found


class TenantSender:
    """Sends each request with the key of its tenant, which is the request's lane."""

    def __init__(self, target: Target, keys: Mapping[str, str | None]) -> None:
        by_key = {key: target.sender(key) for key in set(keys.values())}
        self._senders: dict[str, Sender] = {name: by_key[key] for name, key in keys.items()}
        self._open = list(by_key.values())
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for sender in self._open:
            await self._stack.enter_async_context(sender)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def send(
        self, asked: Asked, origin_s: float | None = None, until_s: float | None = None
    ) -> Seen:
        return await self._senders[asked.lane].send(asked, origin_s, until_s)
