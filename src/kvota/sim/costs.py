"""Step costs to begin with, until `scripts/record_steps.py` has measured the machine at hand."""

from kvota.sim.executor import StepCost

# SmolLM2-135M-Instruct Q4_1 on two cores that were busy with other work, and busier towards the
# end: 313 steps, mean error 19 % over the first 60 % that it was fitted to, 51 % over the rest.
# So it has the right shape and order of magnitude, and is not good enough to predict with.
CPU_SMOLLM2 = StepCost(
    base=0.0178,
    per_prefill_token=0.00123,
    per_attention=1.18e-6,
    per_decode=0.000777,
    per_context=9.98e-6,
)
