"""Which configuration to take, and why.

Every storage of weights × tensor parallelism × KV type that the hardware can is worked out. Of
those that fit and keep both targets the one wins that serves the users on the fewest devices; of
equals, the one that costs least quality; then fewer devices a replica. So a coarser storage is
taken exactly when it saves a device. Where nothing keeps the targets, the nearest miss is shown.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvota.core.errors import ConfigError, InsufficientMemory
from kvota.kv.layout import CacheType
from kvota.tools.plan.gguf_shape import STORED
from kvota.tools.plan.hardware import Arithmetic, Hardware
from kvota.tools.plan.methods import Method, methods_on
from kvota.tools.plan.planner import HEADROOM, Choice, Plan, work_out
from kvota.tools.plan.shape import ModelShape
from kvota.tools.plan.workload import Workload

DEVICES_MAX: Final = 8  # of one machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the operator has settled already; None: to be recommended."""

    method: Method | None = None
    checkpoint: Method | None = None  # how it is stored, if quantized: nothing finer is looked at
    tensor_parallel: int | None = None
    cache_type: CacheType | None = None
    devices_max: int = DEVICES_MAX  # of one replica


@dataclass(frozen=True, slots=True)
class Reason:
    setting: str
    value: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    plan: Plan
    reasons: tuple[Reason, ...]
    compared: tuple[Plan, ...]  # the best of each storage, this plan among them
    too_large: tuple[str, ...]  # storages that do not fit on so many devices


def recommend(
    shape: ModelShape, hardware: Hardware, workload: Workload, wanted: Wanted | None = None
) -> Recommendation:
    """Raises InsufficientMemory when nothing fits, ConfigError when nothing can be."""
    wanted = wanted or Wanted()
    methods = _methods(hardware, wanted)
    plans: list[Plan] = []
    refusals: list[ConfigError | InsufficientMemory] = []
    for choice in _choices(hardware, methods, wanted):
        try:
            plans.append(work_out(shape, hardware, workload, choice))
        except (ConfigError, InsufficientMemory) as error:
            refusals.append(error)
    if not plans:
        raise _nothing_fits(shape, hardware, wanted, refusals)
    best = min(plans, key=_cost)
    compared = [min(of, key=_cost) for of in _by_method(plans, methods)]
    fitting = {plan.choice.method.name for plan in plans}
    too_large = [method for method in methods if method.name not in fitting]
    return Recommendation(
        plan=best,
        reasons=tuple(_reasons(best, plans, too_large, wanted)),
        compared=tuple(compared),
        too_large=tuple(method.name for method in too_large),
    )


def _methods(hardware: Hardware, wanted: Wanted) -> list[Method]:
    if wanted.method is not None:
        return [wanted.method]
    if wanted.checkpoint is None:
        return methods_on(hardware)
    coarser = (one for one in methods_on(hardware) if one.rank > wanted.checkpoint.rank)
    return [wanted.checkpoint, *coarser]


def _choices(hardware: Hardware, methods: Sequence[Method], wanted: Wanted) -> Iterator[Choice]:
    degrees = [1, 2, 4, 8] if hardware.link is not None else [1]
    degrees = [degree for degree in degrees if degree <= wanted.devices_max]
    if wanted.tensor_parallel is not None:
        degrees = [wanted.tensor_parallel]
    caches = [wanted.cache_type] if wanted.cache_type else _cache_types(hardware)
    for method in methods:
        for degree in degrees:
            for cache_type in caches:
                yield Choice(method, degree, cache_type)


def _cache_types(hardware: Hardware) -> list[CacheType]:
    if not hardware.is_gpu:
        return [CacheType.F16, CacheType.U8]
    return [CacheType.F16, CacheType.F8] if hardware.can(Arithmetic.F8) else [CacheType.F16]


def _cost(plan: Plan) -> tuple[float, ...]:
    """Less is better, the first difference decides."""
    over = max(
        plan.alone.ttft_s / plan.workload.ttft_s, plan.alone.tpot_s / plan.workload.tpot_s, 1.0
    )
    choice = plan.choice
    is_small_cache = choice.cache_type is not CacheType.F16
    if plan.misses:
        return (1, over, plan.num_devices, choice.method.rank, is_small_cache)
    return (
        0,
        plan.num_devices,
        choice.method.rank + is_small_cache,
        choice.tensor_parallel,
        -plan.loaded.requests_per_s,
    )


def _by_method(plans: Sequence[Plan], methods: Sequence[Method]) -> Iterator[list[Plan]]:
    for method in methods:
        own = [plan for plan in plans if plan.choice.method is method]
        if own:
            yield own


def _reasons(
    best: Plan, plans: Sequence[Plan], too_large: Sequence[Method], wanted: Wanted
) -> Iterator[Reason]:
    choice = best.choice
    yield Reason("weights", choice.method.name, _why_method(best, plans, too_large, wanted))
    if best.hardware.is_gpu:
        yield Reason(
            "tensor parallel", str(choice.tensor_parallel), _why_parallel(best, plans, wanted)
        )
    yield Reason("KV dtype", kv_name(choice.cache_type), _why_cache(best, plans, wanted))
    yield Reason("max_model_len", f"{best.max_model_len:,}", _why_length(best))
    at_once = "max_num_seqs" if best.hardware.is_gpu else "max_running_requests"
    yield Reason(at_once, f"{best.loaded.concurrency:,}", _why_seqs(best))
    yield Reason("max_num_batched_tokens", f"{best.max_num_batched_tokens:,}", _why_chunk(best))
    if best.misses:
        yield Reason("replicas", "–", "no number of them makes one request faster")
    else:
        yield Reason("replicas", f"{best.replicas:,}", _why_replicas(best))


def _why_method(
    best: Plan, plans: Sequence[Plan], too_large: Sequence[Method], wanted: Wanted
) -> str:
    if wanted.method:
        return "as in the file" if wanted.method.name == STORED else "as asked"
    if best.misses:
        return "comes nearest to the targets"
    if best.choice.method is wanted.checkpoint:
        return f"as its checkpoint has them: {best.choice.method.title}"
    finer = [plan for plan in plans if plan.choice.method.rank < best.choice.method.rank]
    if not finer:
        return _why_finest(best, plans, too_large)
    nearest = min(finer, key=_cost)
    name = nearest.choice.method.name
    if nearest.misses:
        return f"{name} misses the target for {' and '.join(nearest.misses)}"
    if nearest.num_devices == best.num_devices:
        return f"as many devices as {name}, at a smaller cost of quality with its KV type"
    return f"{name} would take {_devices(nearest.num_devices)} instead of {best.num_devices}"


def _why_finest(best: Plan, plans: Sequence[Plan], too_large: Sequence[Method]) -> str:
    finer = [method.name for method in too_large if method.rank < best.choice.method.rank]
    if finer:
        return f"{', '.join(finer)} would not fit"
    keeping = {plan.choice.method.name for plan in plans if not plan.misses}
    if len(keeping) == 1:
        return "the only one that keeps the targets"
    if not best.hardware.is_gpu:
        return "kvota's default, and nothing else saves a machine"
    return "no coarser one saves a device"


def _why_parallel(best: Plan, plans: Sequence[Plan], wanted: Wanted) -> str:
    if wanted.tensor_parallel is not None:
        return "as asked"
    degree, method = best.choice.tensor_parallel, best.choice.method
    same = [plan for plan in plans if plan.choice.method is method]
    fewer = [plan for plan in same if plan.choice.tensor_parallel < degree]
    if degree == 1:
        return "one device holds and carries it"
    if not fewer:
        return "on fewer devices weights and one request do not fit"
    nearest = min(fewer, key=_cost)
    on = _devices(nearest.choice.tensor_parallel)
    if nearest.misses:
        return f"on {on} it misses the target for {' and '.join(nearest.misses)}"
    return f"replicas on {on} each would take {_devices(nearest.num_devices)} in all"


def _why_cache(best: Plan, plans: Sequence[Plan], wanted: Wanted) -> str:
    if wanted.cache_type:
        return "as asked"
    if best.choice.cache_type is CacheType.F16:
        return f"16 bits hold {best.num_typical:,} typical requests, and cost no quality"
    wide = [
        plan
        for plan in plans
        if plan.choice.method is best.choice.method and plan.choice.cache_type is CacheType.F16
    ]
    if not wide:
        return "in 16 bits one request does not fit"
    nearest = min(wide, key=_cost)
    return f"16 bits would take {_devices(nearest.num_devices)} instead of {best.num_devices}"


def _why_length(best: Plan) -> str:
    fits = f"{best.num_longest:,} such fit at once"
    if best.workload.longest_tokens is not None:
        return f"as asked; {fits}"
    if best.max_model_len == best.shape.max_position:
        return f"the model's own limit; {fits}"
    return f"the model could read {best.shape.max_position:,}, and no more fits"


def _why_seqs(best: Plan) -> str:
    is_target = best.limited_by.startswith("the target")
    why = f"{'one more would break' if is_target else 'limited by'} {best.limited_by}"
    return f"{why}; TPOT is {best.loaded.tpot_s * 1000:.0f} ms there"


def _why_chunk(best: Plan) -> str:
    if not best.hardware.is_gpu:
        return "kvota's default"
    return "the largest step of prompt tokens that holds decodes up no longer than the TPOT target"


def _why_replicas(best: Plan) -> str:
    return (
        f"{best.workload.users:,} users, {best.users_per_replica:,} a replica: "
        f"{HEADROOM:.0%} of {best.loaded.concurrency:,}, the rest is for bursts"
    )


def _nothing_fits(
    shape: ModelShape,
    hardware: Hardware,
    wanted: Wanted,
    refusals: Sequence[ConfigError | InsufficientMemory],
) -> ConfigError | InsufficientMemory:
    short = [error for error in refusals if isinstance(error, InsufficientMemory)]
    if not short:
        return refusals[-1] if refusals else ConfigError("there is nothing to choose from.")
    most = wanted.tensor_parallel or (wanted.devices_max if hardware.link is not None else 1)
    return InsufficientMemory(
        f"{shape.name} does not fit on {most} × {hardware.title}, not even with the smallest "
        f"weights looked at: {short[-1].message}"
    )


def kv_name(cache_type: CacheType) -> str:
    """As operators of vLLM write it."""
    return "fp8" if cache_type is CacheType.F8 else cache_type.label


def _devices(number: int) -> str:
    return f"{number:,} device{'s' if number > 1 else ''}"
