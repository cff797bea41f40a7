"""Step costs to begin with, until `scripts/record_steps.py` has measured the machine at hand."""

from kvota.sim.executor import StepCost

# SmolLM2-135M-Instruct Q4_1 on two quiet cores with AVX-512 VNNI: 2,718 steps recorded in 100 s,
# mean error 9.2 % and p99 40 % over the last 40 %, which were not fitted. Most of that is the
# machine: steps of one and the same shape spread by a half (p99 over median) on shared cores.
CPU_SMOLLM2 = StepCost(
    base=0.01106,
    per_prefill_token=0.000495,
    per_attention=4.32e-7,
    per_decode=0.000504,
    per_context=2.35e-6,
    any_prefill=0.00369,
)
