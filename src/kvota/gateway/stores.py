"""What a gateway keeps outside its process: keys, usage and rollouts in a database, limits, the
journal.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvota.core.clock import Clock
from kvota.core.errors import ConfigError
from kvota.gateway.auth import Door, is_loopback
from kvota.gateway.limits import RateLimits
from kvota.gateway.rollouts import RolloutBook
from kvota.gateway.settings import GatewaySettings
from kvota.gateway.store.database import StoreUnusable, database_url, open_database, state_dir_of
from kvota.gateway.store.keys import KEY_TABLES, KeyStore
from kvota.gateway.store.limit_windows import LimitStore, MemoryLimitStore
from kvota.gateway.store.redis_limits import RedisLimitStore
from kvota.gateway.store.rollouts import ROLLOUT_TABLES, RolloutStore
from kvota.gateway.store.usage import USAGE_TABLES, UsageStore
from kvota.gateway.usage import UsageBook
from kvota.telemetry.journal import JournalWriter
from kvota.telemetry.log import Log
from kvota.telemetry.trace import Tracing, new_tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    door: Door
    limits: RateLimits
    usage: UsageBook
    rollouts: RolloutBook
    journal: JournalWriter | None
    tracing: Tracing | None  # None: nobody asked for traces


def open_stores(
    settings: GatewaySettings,
    host: str,
    environment: Mapping[str, str],
    clock: Clock,
    log: Log,
    closing: ExitStack,
    *,
    trace_endpoint: str | None = None,
) -> Stores:
    """Open all of it; `closing` closes it. Blocks. Raises ConfigError, also for a database that
    does not answer: without keys nobody could be let in.
    """

    def report(error: StoreUnusable) -> None:
        log.warning("store", why=error.message)

    state_dir = state_dir_of(settings.state_dir, environment)
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        database = open_database(
            database_url(settings.database, state_dir), KEY_TABLES, USAGE_TABLES, ROLLOUT_TABLES
        )
        closing.callback(database.close)
        door = Door(
            KeyStore(database),
            may_be_open=is_loopback(host),
            hides_models=settings.hide_models,
            allowed_hosts=settings.allowed_hosts,
            on_stale=report,
        )
        door.refresh()
        rollouts = RolloutBook(RolloutStore(database), log)
        rollouts.read()
    except StoreUnusable as error:
        raise ConfigError(
            f"The database of keys and rollouts cannot be used. {error.message}"
        ) from error
    except OSError as error:
        raise ConfigError(f"Cannot write to {state_dir}: {error.strerror}.") from error
    waiting = state_dir / "usage" / database.name  # gateways beside this one may use another
    usage = UsageBook(waiting, UsageStore(database), on_failed=report)
    closing.callback(usage.close)
    return Stores(
        door=door,
        limits=RateLimits(_limit_store(settings, clock), clock, on_degraded=report),
        usage=usage,
        rollouts=rollouts,
        journal=_journal(settings.journal, closing),
        tracing=_tracing(trace_endpoint, closing),
    )


def _limit_store(settings: GatewaySettings, clock: Clock) -> LimitStore:
    if settings.limits_store is None:
        return MemoryLimitStore(clock)
    return RedisLimitStore(settings.limits_store)


def _tracing(endpoint: str | None, closing: ExitStack) -> Tracing | None:
    tracing = new_tracing(endpoint, service="kvota-gateway")
    if tracing is not None:
        closing.callback(tracing.close)
    return tracing


def _journal(path: str | None, closing: ExitStack) -> JournalWriter | None:
    if path is None:
        return None
    try:
        journal = JournalWriter(Path(path).expanduser())
    except OSError as error:
        raise ConfigError(f"journal: cannot write {path}: {error.strerror}.") from error
    closing.callback(journal.close)
    return journal
