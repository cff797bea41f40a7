"""Step costs to begin with, until `kvota calibrate` has measured the machine at hand."""

from kvota.sim.executor import StepCost

# SmolLM2-135M-Instruct Q4_1 on two cores.
CPU_SMOLLM2 = StepCost(
    base=0.0113, per_prefill_token=0.0012, per_attention=5e-7, per_decode=0.0022, per_context=8e-6,
)  # fmt: skip
