"""The door: from a request's headers to its Caller, or a 401 that says what to do.

    Authorization: Bearer kv-3f9a1c2b4d5e-<64 hex digits>      or      x-api-key: kv-…

All keys are held in memory; a look costs one SHA-256 and one dictionary access. `watch` asks the
store once a second whether its version has moved and loads the keys anew when it has, so what
another process did (`kvota keys revoke …`) counts within about two seconds. While the database
cannot be reached, the last known keys stay in force.

Without a single key ever made, the door is open, but only where the caller says that it may be:
on loopback. Revoked and expired keys count as keys, so a door never falls open again. An open door
looks at the host that the client meant: a page whose name its owner lets point at 127.0.0.1 (DNS
rebinding) is of the same origin as this server to a browser, and the browser sends the page's name.
"""

import asyncio
import ipaddress
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from hmac import compare_digest
from typing import Final, Protocol

from kvota.core.errors import (
    ConfigError,
    Forbidden,
    KeyProblem,
    ModelNotAllowed,
    ModelNotFound,
    Unauthorized,
)
from kvota.gateway.caller import Caller, anonymous
from kvota.gateway.store.database import StoreUnusable
from kvota.gateway.store.keys import KeyRecord, hash_secret, split_key

REFRESH_EVERY_S: Final = 1.0
_BEARER: Final = b"bearer "


class Denial(StrEnum):
    """Why the door stayed shut: for the log and the abuse watch. Clients hear less."""

    MISSING = "missing"
    MALFORMED = "malformed"
    UNKNOWN_ID = "unknown_id"
    WRONG_SECRET = "wrong_secret"
    REVOKED = "revoked"
    EXPIRED = "expired"


class Denied(Unauthorized):
    """`reason` and `key_id` are for the log; the id is as claimed, and None when there is none."""

    def __init__(
        self, problem: KeyProblem, message: str, reason: Denial, key_id: str | None = None
    ) -> None:
        super().__init__(problem, message)
        self.reason = reason
        self.key_id = key_id


class KeySource(Protocol):
    """Where keys come from; both calls may block. They raise StoreUnusable."""

    def version(self) -> int: ...

    def all(self) -> list[KeyRecord]: ...


class Door:
    """One per gateway. `refresh` once before the first request; `admit` never blocks."""

    def __init__(
        self,
        source: KeySource,
        *,
        may_be_open: bool,
        hides_models: bool = False,
        allowed_hosts: Collection[str] = (),
        on_stale: Callable[[StoreUnusable], None] = lambda _: None,
    ) -> None:
        """`hides_models`: a model that a key may not call does not exist for it (404, not 403).
        `allowed_hosts`: names, besides those of loopback, that an open door may be called by.

        `on_stale` hears every failed look at the store.
        """
        self._source = source
        self._may_be_open = may_be_open
        self.hides_models = hides_models
        self.allowed_hosts = allowed_hosts
        self._on_stale = on_stale
        self._version: int | None = None
        self._keys: Mapping[str, KeyRecord] = {}
        self._anonymous = anonymous()

    @property
    def is_open(self) -> bool:
        """Everybody may come in: no key was ever made, and this place allows that."""
        return not self._keys and self._may_be_open

    @property
    def num_keys(self) -> int:
        """Keys ever made, revoked and expired ones included."""
        return len(self._keys)

    def refresh(self) -> bool:
        """Load the keys if the store has changed; True if it had. Blocks; StoreUnusable."""
        version = self._source.version()  # before the keys: a change in between is seen next time
        if version == self._version:
            return False
        self._keys = {record.key_id: record for record in self._source.all()}
        self._version = version
        return True

    async def watch(self, every_s: float = REFRESH_EVERY_S) -> None:
        """Keep up with the store until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await asyncio.to_thread(self.refresh)
            except StoreUnusable as error:
                self._on_stale(error)

    def admit(self, headers: Mapping[bytes, bytes], now_unix: float) -> Caller:
        """Whose request this is. Header names are lower case. Raises Denied, and Forbidden for
        who came through an open door by a name that is not its own."""
        presented = _presented(headers)
        if self.is_open:
            self._check_host(headers.get(b"host", b"").decode("latin-1"))
            return self._anonymous
        if presented is None:
            raise Denied(
                KeyProblem.MISSING,
                "This server needs an API key: send the header `Authorization: Bearer <key>`.",
                Denial.MISSING,
            )
        return self._checked(presented, now_unix).caller

    def _check_host(self, header: str) -> None:
        """Browsers always say where they mean to go; who says nothing is none."""
        text = header.lower()
        host = text.partition("]")[0][1:] if text[:1] == "[" else text.partition(":")[0]
        is_own = not host or is_loopback(host) or host.endswith(".localhost")  # RFC 6761, 6.3
        if not is_own and not {host, "*"} & {*map(str.lower, self.allowed_hosts)}:
            raise Forbidden(
                f"This server has no API keys and answers only to localhost, not to {host[:256]}. "
                "Its operator can make a key with `kvota keys create`, or name that host in "
                "[gateway] allowed_hosts."
            )

    def _checked(self, presented: bytes, now_unix: float) -> KeyRecord:
        parts = split_key(presented)
        if parts is None:
            raise _invalid(Denial.MALFORMED)
        key_id, secret = parts
        record = self._keys.get(key_id)
        if record is None:
            raise _invalid(Denial.UNKNOWN_ID, key_id)
        if not _is_secret_of(record, hash_secret(secret), now_unix):
            raise _invalid(Denial.WRONG_SECRET, key_id)
        if record.revoked_unix is not None:
            raise _invalid(Denial.REVOKED, key_id)
        if record.expires_unix is not None and now_unix >= record.expires_unix:
            raise Denied(
                KeyProblem.EXPIRED,
                f"The API key {key_id} has expired. Ask for a new one.",
                Denial.EXPIRED,
                key_id,
            )
        return record

    def check_model(self, caller: Caller, model: str, *aliases: str) -> None:
        """Raises ModelNotAllowed, or the ModelNotFound of any unknown name where models hide."""
        if caller.may_use(model, *aliases):
            return
        if self.hides_models:
            raise model_not_found(model)
        raise ModelNotAllowed(
            f"This API key may not call {model[:256]}; GET /v1/models lists what it may call.",
            param="model",
        )


def model_not_found(model: str) -> ModelNotFound:
    """The one answer for names that are not there, and for those that this caller may not see."""
    return ModelNotFound(
        f"There is no model {model[:256]} here; GET /v1/models lists them.", param="model"
    )


def refuse_open_door(host: str, *, has_keys: bool) -> None:
    """Raises ConfigError where a server without keys would listen beyond this machine."""
    if has_keys or is_loopback(host):
        return
    raise ConfigError(
        f"No API key exists, so everybody who reaches {host} could use this server. "
        "Make one with `kvota keys create`, and the same --config if there is one, or listen on "
        "127.0.0.1."
    )


def is_loopback(host: str) -> bool:
    """True only for addresses, and the name localhost, that cannot be reached from outside."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _presented(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key in `Authorization: Bearer`, or else in `x-api-key`."""
    authorization = headers.get(b"authorization", b"")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        key = authorization[len(_BEARER) :].strip()
        if key:
            return key
    return headers.get(b"x-api-key", b"").strip() or None


def _is_secret_of(record: KeyRecord, digest: bytes, now_unix: float) -> bool:
    if compare_digest(digest, record.secret_hash):
        return True
    if record.old_secret_hash is None or record.old_secret_until_unix is None:
        return False
    in_grace = now_unix < record.old_secret_until_unix
    return compare_digest(digest, record.old_secret_hash) and in_grace


def _invalid(reason: Denial, key_id: str | None = None) -> Denied:
    # One message for all, so that nobody can find out which ids exist.
    return Denied(KeyProblem.INVALID, "The API key is not valid.", reason, key_id)
