"""`kvota replay`: recorded traffic again, on time, against any OpenAI-compatible server."""
