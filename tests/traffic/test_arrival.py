import pytest

from kvota.traffic.arrival import Arrival, Scaling, prompt_of, split


def arrival(**fields: object) -> Arrival:
    plain = {"at_s": 1.0, "prompt_tokens": 1000, "output_tokens": 7, "max_tokens": 64}
    return Arrival(**(plain | fields))  # type: ignore[arg-type]


def test_equal_prefix_ids_are_equal_tokens_and_everything_else_is_fresh() -> None:
    first = prompt_of(arrival(prefix=(4, 9)), number=0)
    second = prompt_of(arrival(prefix=(4, 7)), number=1)
    assert first[:512] == second[:512]
    assert not set(first[512:]) & set(second[512:])


def test_a_prompt_has_exactly_its_length_whatever_its_prefix() -> None:
    for prefix in ((), (1,), (1, 2), (1, 2, 3)):
        assert len(prompt_of(arrival(prefix=prefix), number=3)) == 1000


def test_a_cut_last_block_is_the_beginning_of_the_whole_one() -> None:
    whole = prompt_of(arrival(prompt_tokens=1024, prefix=(1, 2)), number=0)
    assert prompt_of(arrival(prefix=(1, 2)), number=1) == whole[:1000]


def test_scaling_keeps_the_number_of_prefix_blocks() -> None:
    [scaled] = Scaling(time=3.0, length=16).apply([arrival(prefix=(1, 2))])
    assert (scaled.at_s, scaled.prompt_tokens, scaled.prefix_block) == (3.0, 63, 32)
    assert -(-scaled.prompt_tokens // scaled.prefix_block) == 2
    assert (scaled.output_tokens, scaled.max_tokens) == (1, 4)


def test_a_prefix_block_that_cannot_be_divided_is_said() -> None:
    with pytest.raises(ValueError, match="does not divide the prefix block of 512"):
        list(Scaling(length=3).apply([arrival(prefix=(1, 2))]))


def test_the_judged_part_starts_at_zero() -> None:
    known, judged = split([arrival(at_s=float(second)) for second in range(10)], 0.6)
    assert [one.at_s for one in known] == [0, 1, 2, 3, 4, 5]
    assert [one.at_s for one in judged] == [0, 1, 2, 3]
