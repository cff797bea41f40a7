"""`kvota evaluate`: is a version of a model, as it is served, as good as another one?

    texts ── windows ──▶ both servers ──▶ log probabilities ──▶ likelihood  perplexity, KL
    prompts ───────────▶ both servers ──▶ greedy answers ─────▶ agreement
    lm_eval, if there ─▶ both servers ──▶ right or wrong ─────▶ tasks
                                                                   └──▶ gate: good, worse, undecided

Everything is measured in pairs: the same window, prompt or question on both sides. So what is hard
for both cancels out, and the error of a difference is far smaller than that of its two sides.
"""
