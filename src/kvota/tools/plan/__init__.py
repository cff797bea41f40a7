"""`kvota plan`: what a model needs, what a machine has, and what can be promised on it.

model   (hf_shape, gguf_shape, catalogue) ─▶ ModelShape ─▶ matrices ─┐
machine (catalogue, here)                 ─▶ Hardware ───────────────┤
workload                                                             ▼
                footprint (bytes) ─▶ roofline (seconds) ─▶ planner ─▶ recommend ─▶ show
"""
