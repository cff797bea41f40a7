from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvota.tools.top.carpark import LETTERS, Bay, Blocks, Letters, Spot, blocks_per_bay, park


def drawn(bays: list[Bay]) -> str:
    signs = {Spot.CACHED: "░", Spot.FREE: "·"}
    return "".join(bay.letter or signs[bay.spot] for bay in bays)


def test_with_room_for_every_block_each_has_its_bay() -> None:
    assert drawn(park(Blocks(5, 2, 3), [("A", 2), ("B", 2)], 20)) == "AABB#░░···"


def test_a_bay_stands_for_as_many_blocks_as_it_must() -> None:
    assert blocks_per_bay(100, 30) == 4
    assert drawn(park(Blocks(8, 4, 8), [("A", 5), ("B", 3)], 10)) == "AAAB░░····"


def test_several_requests_in_one_bay_are_told_as_several() -> None:
    assert drawn(park(Blocks(4, 0, 4), [(letter, 1) for letter in "ABCD"], 2)) == "+·"


def test_blocks_that_requests_share_are_drawn_once() -> None:
    bays = park(Blocks(6, 0, 2), [("A", 6), ("B", 6)], 8)
    assert drawn(bays) == "AAABBB··"


def test_an_empty_pool_and_no_room_draw_nothing_and_do_not_fail() -> None:
    assert park(Blocks(), [("A", 3)], 10) == []
    assert len(park(Blocks(5, 5, 5), [], 0)) == 1


counts = st.integers(0, 300)


@given(counts, counts, counts, st.lists(st.integers(1, 50), max_size=9), st.integers(1, 200))
def test_the_drawing_fits_and_is_true_to_proportion(
    used: int, cached: int, free: int, held: list[int], num_bays: int
) -> None:
    blocks = Blocks(used, cached, free)
    bays = park(blocks, list(zip(LETTERS, held, strict=False)), num_bays)
    width = blocks_per_bay(blocks.total, num_bays)
    assert len(bays) <= num_bays
    assert len(bays) * width >= blocks.total > (len(bays) - 1) * width or not bays
    spots = Counter(bay.spot for bay in bays)
    for spot, count in ((Spot.USED, used), (Spot.CACHED, cached), (Spot.FREE, free)):
        assert abs(spots[spot] * width - count) <= 2 * width, (spot, bays)
    assert all((bay.letter is not None) == (bay.spot is Spot.USED) for bay in bays)


# --- letters


def test_a_letter_stays_with_its_request_and_is_given_again_last() -> None:
    letters = Letters()
    assert letters.assign(["a", "b"]) == {"a": "A", "b": "B"}
    assert letters.assign(["b", "c"]) == {"b": "B", "c": "C"}
    assert letters.assign(["b", "c", "a"])["a"] == "D"


def test_beyond_the_alphabet_requests_share_a_sign_until_a_letter_is_free() -> None:
    letters, many = Letters(), [str(number) for number in range(len(LETTERS) + 1)]
    given_out = letters.assign(many)
    assert sorted(given_out.values()) == sorted([*LETTERS, "+"])
    assert letters.assign(many[1:])[many[-1]] == "A"
