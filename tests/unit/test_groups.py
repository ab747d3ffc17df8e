"""Which gradients travel together."""

from hypothesis import given
from hypothesis import strategies as st

from ringtrain.collectives.groups import MAX_GROUPS, MIN_GROUP_BYTES, ONE_MESSAGE_BYTES, GradientSpec, plan_groups

specs = st.lists(
    st.builds(
        GradientSpec,
        num_bytes=st.integers(0, 8 * MIN_GROUP_BYTES),
        dtype=st.sampled_from(["float32", "float64"]),
        is_sparse=st.booleans(),
    ),
    max_size=60,
)


@given(specs)
def test_each_gradient_travels_once_in_a_group_of_one_type(gradients: list[GradientSpec]) -> None:
    groups = plan_groups(gradients)
    assert sorted(index for group in groups for index in group) == list(range(len(gradients)))
    for group in groups:
        assert len({gradients[index].dtype for index in group}) == 1
        assert len(group) == 1 or not any(gradients[index].is_sparse for index in group)


@given(specs)
def test_groups_leave_in_the_order_of_the_backward_pass(gradients: list[GradientSpec]) -> None:
    for group in plan_groups(gradients):
        assert group == sorted(group, reverse=True)


@given(specs)
def test_there_are_few_groups(gradients: list[GradientSpec]) -> None:
    dense = [group for group in plan_groups(gradients) if not gradients[group[0]].is_sparse]
    types = {gradients[group[0]].dtype for group in dense}
    alone = sum(not spec.is_sparse and spec.num_bytes >= MIN_GROUP_BYTES for spec in gradients)
    assert len(dense) <= MAX_GROUPS + len(types) + min(alone, MAX_GROUPS)


def test_a_small_model_sends_one_message() -> None:
    assert plan_groups([GradientSpec(1000, "float32", False)] * 5) == [[4, 3, 2, 1, 0]]
    halves = [GradientSpec(ONE_MESSAGE_BYTES // 2, "float32", False)] * 2
    assert plan_groups(halves) == [[1, 0]]
    assert plan_groups([*halves, GradientSpec(4, "float32", False)]) == [[1], [0], [2]]


def test_the_last_layers_of_a_large_model_are_reduced_first() -> None:
    groups = plan_groups([GradientSpec(2**20, "float32", False)] * 12)
    assert groups[0][0] == 11
    assert 2 <= len(groups) <= 12
    assert 0 in groups[-1]
