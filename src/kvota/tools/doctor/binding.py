"""Which limit keeps requests waiting, and the setting that moves it.

kvota says for each waiting request what it waits for; where those are not shown, and on other
servers, the KV memory in use decides between the only two limits there are: memory and places.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Final

from kvota.tools.doctor import names
from kvota.tools.doctor.targets import Targets
from kvota.tools.doctor.window import Window

KV_FULL: Final = 0.85  # a desk keeps a margin: with more in use, memory is what is missing


@dataclass(frozen=True, slots=True)
class Binding:
    """`said` completes "waiting for …"."""

    said: str
    change: str
    source: str


def binding(window: Window, targets: Targets) -> Binding:
    whys = Counter(
        one.why for requests in window.live for one in requests if one.why and one.position
    )
    if whys:
        why = whys.most_common(1)[0][0] or ""
        return Binding(why, _change(window, targets, why), "/admin/requests")
    usage = max(window.gauge(*names.KV_USAGE), default=0.0)
    places = window.limit("max_running_requests")
    why = "KV memory" if usage >= KV_FULL else "a place"
    if places is not None and usage < KV_FULL:
        why = f"one of {places:.0f} places"
    return Binding(
        f"{why} (KV in use up to {usage:.0%})",
        _change(window, targets, why),
        window.named(*names.KV_USAGE),
    )


def _change(window: Window, targets: Targets, why: str) -> str:
    if "KV memory" in why:
        if not window.is_kvota:
            return "gpu_memory_utilization up, kv_cache_dtype fp8, a smaller max_model_len"
        return (
            "more KV: kv_memory, kv_budget_ratio, `--kv-cache-dtype u8`; or clients with a "
            "smaller max_tokens; or another node"
        )
    number = re.search(r"\d+", why)
    above = f" above {number[0]}" if number else ""
    if "long requests" in why:
        return f"long_request_concurrency{above}, long_kv_share; or another node for long prompts"
    if "paused" in why:
        return "preempt_after_s up, so that long requests are paused later; or another node"
    places = f"max_running_requests{above}" if window.is_kvota else "a larger max_num_seqs"
    pace = window.histogram(*names.PER_TOKEN)
    if pace is not None and pace.share_above(targets.tpot_s) >= targets.late_share:
        return f"another node: with {places}, tokens would be slower still"
    return f"{places}, while the time per token allows it; or another node"
