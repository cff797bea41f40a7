"""kvota serves an open LLM from a team's own machines without falling over.

Its one idea: a request is not a thread, it is a piece of KV memory.
"""

__version__ = "0.1.0"
