from kvota.core.errors import Refusal, Refused
from kvota.engine.mailbox import Cancel, Drain, Letter, Mailbox

GOING = Refused(Refusal.DRAINING, "Going down.", retry_after_s=1.0)


def test_letters_come_out_in_the_order_they_were_posted() -> None:
    box = Mailbox()
    letters: list[Letter] = [Cancel("a"), Drain(GOING), Cancel("b")]
    for letter in letters:
        box.post(letter)
    assert box.drain() == letters
    assert box.drain() == []


def test_waiting_keeps_the_letter_and_the_order() -> None:
    box = Mailbox()
    box.post(Cancel("first"))
    box.wait(0.0)
    box.wait(0.0)
    box.post(Cancel("second"))
    assert box.drain() == [Cancel("first"), Cancel("second")]


def test_waiting_ends_without_a_letter() -> None:
    box = Mailbox()
    box.wait(0.0)
    assert box.drain() == []
