"""How a backend is, asked at its own pages: is it well, how much KV has it, how busy is it?

    kind       health         capacity                      used · running · waiting
    kvota      /ready         the same names as vLLM        the same names as vLLM
    vLLM       /health        cache_config_info:            kv_cache_usage_perc (before 0.10:
                              num_gpu_blocks × block_size   gpu_cache_usage_perc),
                                                            num_requests_running, …_waiting
    SGLang     /health        max_total_num_tokens,         kv_used_tokens (older:
                              page_size                     token_usage), num_running_reqs,
                                                            num_queue_reqs (--enable-metrics)
    llama.cpp  /health        /props: total_slots × n_ctx   requests_processing, …_deferred
                                                            (--metrics)
    TGI        /health        batch_max_total_tokens        batch_current_max_tokens,
                              (older: on /info)             batch_current_size, queue_size
    Ollama     /api/version   (settings)                    (nothing)
    others     /v1/models     (settings)                    (nothing)

What a backend does not say stays None; then settings and our own ledger speak. llama.cpp with
--kv-unified shares one n_ctx among its slots: there the settings must state the capacity.
"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from kvota.core.clock import Clock
from kvota.core.errors import KvotaError
from kvota.gateway.upstream.connection import Upstream
from kvota.gateway.upstream.correction import KvReading
from kvota.gateway.upstream.failures import AttemptFailed
from kvota.gateway.upstream.kinds import TRAITS, BackendKind
from kvota.gateway.upstream.metrics_page import PAGE_BYTES_MAX, Samples, read_samples, total

PROBE_TIMEOUT_S: Final = 2.0  # of every page but the one for health, which `kinds.py` knows
FACTS_HOLD_S: Final = 30.0  # Ollama and others take models in and out while they run
_ANSWER_BYTES_MAX: Final = 2**20

_CONFIG: Final = "vllm:cache_config_info"
_VLLM: Final = (
    _CONFIG,
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)
_SGLANG: Final = (
    "sglang:max_total_num_tokens",
    "sglang:page_size",
    "sglang:kv_used_tokens",
    "sglang:full_token_usage",
    "sglang:token_usage",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
)
_LLAMACPP: Final = (
    "llamacpp:requests_processing",
    "llamacpp:requests_deferred",
    "llamacpp:kv_cache_tokens",
)
_TGI: Final = (
    "tgi_batch_max_total_tokens",
    "tgi_batch_current_max_tokens",
    "tgi_batch_current_size",
    "tgi_queue_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendState:
    """One look at a backend. None: it does not say."""

    is_healthy: bool
    why: str = ""  # where it is not healthy
    probed_s: float = 0.0  # clock time
    latency_s: float | None = None  # of its health page
    models: tuple[str, ...] | None = None  # while it is away: those it had
    max_model_len: int | None = None
    num_slots: int | None = None  # requests that it runs at once
    capacity_tokens: int | None = None
    block_size: int | None = None
    used_tokens: int | None = None
    running: int | None = None
    waiting: int | None = None

    @property
    def kv_usage(self) -> float | None:
        if self.used_tokens is None or not self.capacity_tokens:
            return None
        return self.used_tokens / self.capacity_tokens

    @property
    def reading(self) -> KvReading:
        return KvReading(capacity_tokens=self.capacity_tokens, used_tokens=self.used_tokens)


class Prober:
    """Asks one backend. What changes seldom is asked when it comes up, and every FACTS_HOLD_S."""

    def __init__(
        self, upstream: Upstream, kind: BackendKind, clock: Clock,
        *, timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        """`timeout_s` of every page; None: what suits the kind."""
        self._upstream = upstream
        self._kind = kind
        self._clock = clock
        self._timeout_s = timeout_s or PROBE_TIMEOUT_S
        self._health_timeout_s = timeout_s or TRAITS[kind].health_timeout_s
        self._facts = BackendState(is_healthy=True)  # models, limits: as last told
        self._facts_until_s = -math.inf

    def forget(self) -> None:
        """Ask for everything anew the next time."""
        self._facts_until_s = -math.inf

    async def probe(self) -> BackendState:
        """Never raises: a backend that cannot be asked is not healthy."""
        began_s = self._clock.now()
        try:
            await self._upstream.fetch(
                TRAITS[self._kind].health_path,
                timeout_s=self._health_timeout_s,
                bytes_max=_ANSWER_BYTES_MAX,
            )
        except KvotaError as error:
            self._went_away()
            why = error.message
            return replace(self._facts, is_healthy=False, why=why, probed_s=self._clock.now())
        now = self._clock.now()
        if now >= self._facts_until_s:
            self._facts_until_s = now + FACTS_HOLD_S  # unless forgotten meanwhile
            self._facts = await self._learn()
            if self._facts.models is None:
                self.forget()  # it may say next time
        state = replace(self._facts, probed_s=now, latency_s=now - began_s)
        return await self._measure(state)

    def _went_away(self) -> None:
        """Its models are still its models: who asks for one is told to come back."""
        old = self._facts
        self._facts = BackendState(
            is_healthy=True, models=old.models, max_model_len=old.max_model_len
        )
        self.forget()

    async def _learn(self) -> BackendState:
        """What it says now; what it does not say this time is as before."""
        cards, about = await asyncio.gather(self._json("/v1/models"), self._about())
        told = _models(cards)
        if self._kind is BackendKind.LLAMACPP:
            told |= _slots(about)
        elif self._kind is BackendKind.TGI:
            told["capacity_tokens"] = _count(about.get("max_batch_total_tokens"))
            told["max_model_len"] = _count(about.get("max_total_tokens"))
        return replace(
            self._facts, **{name: value for name, value in told.items() if value is not None}
        )

    async def _about(self) -> Mapping[str, Any]:
        match self._kind:
            case BackendKind.LLAMACPP:
                return await self._json("/props")
            case BackendKind.TGI:
                return await self._json("/info")
            case _:
                return {}

    async def _measure(self, state: BackendState) -> BackendState:
        match self._kind:
            case BackendKind.KVOTA | BackendKind.VLLM:
                return replace(state, **_of_vllm(await self._metrics(_VLLM)))
            case BackendKind.SGLANG:
                return replace(state, **_of_sglang(await self._metrics(_SGLANG)))
            case BackendKind.LLAMACPP:
                return replace(state, **_of_llamacpp(await self._metrics(_LLAMACPP)))
            case BackendKind.TGI:
                return replace(state, **_of_tgi(await self._metrics(_TGI), state.capacity_tokens))
            case BackendKind.OLLAMA:
                return replace(state, max_model_len=_loaded(await self._json("/api/ps")))
            case _:
                return state

    async def _ask(self, path: str, bytes_max: int = _ANSWER_BYTES_MAX) -> bytes:
        return await self._upstream.fetch(path, timeout_s=self._timeout_s, bytes_max=bytes_max)

    async def _metrics(self, names: tuple[str, ...]) -> Samples:
        """Empty where there is no such page."""
        try:
            return read_samples(await self._ask("/metrics", PAGE_BYTES_MAX), names)
        except KvotaError:
            return {}

    async def _json(self, path: str) -> Mapping[str, Any]:
        """Empty where there is no such page, or no object on it."""
        try:
            said = msgspec.json.decode(await self._ask(path))
        except (AttemptFailed, KvotaError, msgspec.DecodeError, RecursionError):
            return {}
        return said if isinstance(said, dict) else {}


def _models(cards: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing where the page is no list of models."""
    given = cards.get("data")
    if not isinstance(given, list):
        return {}
    listed = [one for one in given if isinstance(one, dict)]
    lengths = [length for one in listed if (length := _count(one.get("max_model_len")))]
    return {
        "models": tuple(str(one["id"]) for one in listed if "id" in one),
        "max_model_len": min(lengths, default=None),
    }


def _of_vllm(samples: Samples) -> dict[str, Any]:
    """Several engines behind one page (data parallel) are summed."""
    pools: dict[str, tuple[int, int]] = {}  # by engine: tokens, block size
    for config in samples.get(_CONFIG, ()):
        blocks = _count(config.labels.get("num_gpu_blocks"))
        size = _count(config.labels.get("block_size"))
        if blocks and size:
            pools[config.labels.get("engine", "")] = (blocks * size, size)
    capacity = sum(tokens for tokens, _ in pools.values()) or None
    used = None
    usages = samples.get("vllm:kv_cache_usage_perc") or samples.get("vllm:gpu_cache_usage_perc")
    if usages and capacity:
        shares = [min(max(one.value, 0.0), 1.0) for one in usages]
        used = round(sum(shares) / len(shares) * capacity)
    return {
        "capacity_tokens": capacity,
        "block_size": max((size for _, size in pools.values()), default=None),
        "used_tokens": used,
        "running": _count(total(samples, "vllm:num_requests_running")),
        "waiting": _count(total(samples, "vllm:num_requests_waiting")),
    }


def _of_sglang(samples: Samples) -> dict[str, Any]:
    """Data-parallel ranks have a pool each, and are summed. `token_usage` is that of its fullest
    pool, where a model has several kinds of layers: not what is asked.
    """
    capacity = _by_rank(samples, "sglang:max_total_num_tokens")
    used = _by_rank(samples, "sglang:kv_used_tokens")
    if not used:
        shares = _by_rank(samples, "sglang:full_token_usage") or _by_rank(
            samples, "sglang:token_usage"
        )
        used = {rank: share * capacity.get(rank, 0.0) for rank, share in shares.items()}
    page_sizes = _by_rank(samples, "sglang:page_size").values()
    return {
        "capacity_tokens": round(sum(capacity.values())) or None,
        "block_size": _count(max(page_sizes, default=None)),
        "used_tokens": round(sum(used.values())) if used and any(capacity.values()) else None,
        "running": _count(_sum_of(_by_rank(samples, "sglang:num_running_reqs"))),
        "waiting": _count(_sum_of(_by_rank(samples, "sglang:num_queue_reqs"))),
    }


def _of_llamacpp(samples: Samples) -> dict[str, Any]:
    return {
        "used_tokens": _count(total(samples, "llamacpp:kv_cache_tokens")),
        "running": _count(total(samples, "llamacpp:requests_processing")),
        "waiting": _count(total(samples, "llamacpp:requests_deferred")),
    }


def _of_tgi(samples: Samples, capacity_tokens: int | None) -> dict[str, Any]:
    return {
        "capacity_tokens": _count(total(samples, "tgi_batch_max_total_tokens")) or capacity_tokens,
        "used_tokens": _count(total(samples, "tgi_batch_current_max_tokens")),
        "running": _count(total(samples, "tgi_batch_current_size")),
        "waiting": _count(total(samples, "tgi_queue_size")),
    }


def _slots(props: Mapping[str, Any]) -> dict[str, Any]:
    settings = props.get("default_generation_settings")
    length = _count(settings.get("n_ctx")) if isinstance(settings, dict) else None
    slots = _count(props.get("total_slots"))
    capacity = length * slots if length and slots else None
    return {"num_slots": slots, "max_model_len": length, "capacity_tokens": capacity}


def _loaded(processes: Mapping[str, Any]) -> int | None:
    """The shortest context of what Ollama has in memory; longer prompts it cuts in silence."""
    given = processes.get("models")
    listed = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    lengths = [length for one in listed if (length := _count(one.get("context_length")))]
    return min(lengths, default=None)


def _by_rank(samples: Samples, name: str) -> dict[str, float]:
    """By data-parallel rank. What its tensor-parallel ranks repeat counts once, the largest."""
    found: dict[str, float] = {}
    for one in samples.get(name, ()):
        rank = one.labels.get("dp_rank", "")
        found[rank] = max(found.get(rank, 0.0), one.value)
    return found


def _sum_of(by_rank: Mapping[str, float]) -> float | None:
    return sum(by_rank.values()) if by_rank else None


def _count(value: Any) -> int | None:
    """A number of things, from JSON, a label or a gauge; None for what is none."""
    try:
        number = int(float(value))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number >= 0 else None
