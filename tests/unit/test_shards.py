"""Which values are whose, where the update is shared out."""

from hypothesis import given
from hypothesis import strategies as st

from ringtrain.collectives.shards import ALIGNED, plan_pieces

lengths_of_tensors = st.lists(st.integers(0, 5000), min_size=1, max_size=30)
sizes = st.integers(1, 9)


@given(lengths_of_tensors, sizes)
def test_each_value_belongs_to_one_rank_in_rank_order(lengths: list[int], size: int) -> None:
    pieces = plan_pieces(lengths, size)
    assert [len(of_rank) for of_rank in pieces] == size * [len(lengths)]
    for tensor, length in enumerate(lengths):
        of_tensor = [of_rank[tensor] for of_rank in pieces]
        values = [value for piece in of_tensor for value in range(piece.begin, piece.end)]
        assert values == list(range(length))
        assert [piece.end for piece in of_tensor[:-1]] == [piece.begin for piece in of_tensor[1:]]


@given(lengths_of_tensors, sizes)
def test_shards_are_equal_and_cut_at_cache_lines(lengths: list[int], size: int) -> None:
    for of_rank in plan_pieces(lengths, size):
        assert abs(sum(piece.length for piece in of_rank) - sum(lengths) / size) <= ALIGNED + 1
        for piece, length in zip(of_rank, lengths, strict=True):
            assert piece.begin % ALIGNED == 0 or piece.begin == length
