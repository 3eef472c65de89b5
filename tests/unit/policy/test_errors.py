"""Printed limits are accepted."""

from hypothesis import given
from hypothesis import strategies as st

from moc.policy.errors import rounded_up


@given(st.floats(1, 1e18), st.sampled_from([1.0, 1e9]))
def test_printed_limit_is_sufficient_and_close(value, unit):
    printed = float(rounded_up(value, unit))
    assert value <= printed * unit <= 1.02 * value


def test_rounded_limit_has_expected_text():
    assert [rounded_up(value) for value in (1e9, 1.0001e9, 7.77e5, 123456e9)] == ["1", "1.01", "0.000777", "124000"]
