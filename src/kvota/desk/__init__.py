"""Every request priced in KV memory: it runs, waits in a bounded line, or is refused honestly."""
