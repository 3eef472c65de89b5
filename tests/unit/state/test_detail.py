"""Which slots of an operator a detail holds."""

from moc.state.operators import Detail
from tests.cases import each_row

SLOTS = ("param", "master", "exp_avg", "exp_avg_sq", "momentum_buffer", "grad")


@each_row(
    ("detail", "slots"),
    [
        (Detail.FULL, {"param", "master", "exp_avg", "exp_avg_sq", "momentum_buffer"}),
        (Detail.MASTER, {"param", "master"}),
        (Detail.MOMENTS, {"exp_avg", "exp_avg_sq", "momentum_buffer"}),
        (Detail.COMPUTE, {"param"}),
        (Detail.GRAD, {"grad"}),
    ],
    ids=lambda value: value.name if isinstance(value, Detail) else "",
)
def test_state_subset_has_expected_slots(detail, slots):
    assert {slot for slot in SLOTS if detail.holds(slot)} == slots
