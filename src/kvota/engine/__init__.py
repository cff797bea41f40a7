"""The loop: drain, expire, plan, execute, apply, publish. Synchronous, with a single writer."""
