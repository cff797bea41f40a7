"""What a request is said to need at the desk."""

from kvota.node.pricing import ticket_of
from tests.support.step_loop import StepLoop, new_request

PROMPT = list(range(20))


def test_cached_blocks_of_the_prompt_are_priced_apart() -> None:
    loop = StepLoop()
    loop.finish_all(new_request("first", PROMPT))
    ticket = ticket_of(new_request("again", PROMPT), loop.cache)
    assert ticket.cached_tokens == 16
    assert len(ticket.prefix_blocks) == 4


def test_a_prompt_whose_logprobs_are_wanted_costs_all_of_itself() -> None:
    """It reads nothing from the cache: the desk would let in what does not fit."""
    loop = StepLoop()
    loop.finish_all(new_request("first", PROMPT))
    request = new_request("scored", PROMPT, prompt_logprobs=0)
    ticket = ticket_of(request, loop.cache)
    assert (ticket.cached_tokens, list(ticket.prefix_blocks)) == (0, [])
    (scored,) = loop.finish_all(request)
    assert scored.cached_tokens == 0
