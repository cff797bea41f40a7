"""Scripts for a fake backend that takes token ids and counts them, as ours and vLLM do."""

from typing import Any

from tests.support.fake_backend import Received, Wire, event, ordinary_events

VOCABULARY = list(range(1000, 1200))


async def counting(asked: Received, wire: Wire) -> None:
    """Streams max_tokens words, with the true usage; every prompt is half cached."""
    wanted = asked.json
    prompt = wanted["prompt"]
    num_prompt = len(prompt) if isinstance(prompt, list) else len(prompt.split())
    await wire.head()
    for one in ordinary_events(asked.path, wanted["max_tokens"], 1, has_usage=False)[:-1]:
        await wire.send(one)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": wanted["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": num_prompt // 2},
    }
    await wire.send(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
    await wire.end()


async def tokenizing(asked: Received, wire: Wire) -> None:
    await wire.json({"tokens": VOCABULARY, "count": len(VOCABULARY)})
