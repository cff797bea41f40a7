"""A CPU for the planner's tests, so that they do not measure the one they run on."""

from kvota.tools.plan.hardware import Arithmetic, Hardware
from kvota.tools.plan.here import EFFICIENCY, VNNI_GAIN

# Two threads of an AVX-512 EPYC, as `kvota.tools.plan.here` found them.
CPU = Hardware(
    name="here",
    title="this machine (2 cores)",
    source="measured once",
    memory_bytes=16 * 10**9,
    memory_from="test",
    bandwidth=41e9,
    compute={Arithmetic.F32: 200e9, Arithmetic.I8: 200e9 * VNNI_GAIN},
    is_gpu=False,
    efficiency=EFFICIENCY,
)
