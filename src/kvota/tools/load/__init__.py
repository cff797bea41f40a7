"""`kvota bench`: load that is sent on time, and what it shows of any OpenAI-compatible server."""
