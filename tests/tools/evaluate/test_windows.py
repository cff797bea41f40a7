import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.tools.evaluate.texts import Text, shipped_texts
from kvota.tools.evaluate.windows import cut_text


@given(st.text(), st.integers(1, 50))
def test_pieces_are_the_whole_text(body: str, num_bytes: int) -> None:
    joined = "".join(cut_text(body, num_bytes))
    assert body.startswith(joined)
    assert not body[len(joined) :].strip()


@pytest.mark.parametrize("text", shipped_texts(), ids=lambda text: text.name)
def test_pieces_of_the_shipped_texts_end_with_a_sentence_or_a_line(text: Text) -> None:
    pieces = cut_text(text.body, 100)
    assert all(piece.rstrip(" ")[-1] in "\n.!?。！？" for piece in pieces[:-1])
    assert all(len(piece.encode()) >= 100 for piece in pieces[:-1])
