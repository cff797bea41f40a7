"""How much memory a model takes, and what is left for KV. Imports no engine and no server."""
