"""The host side of the kernels, which runs some hundred times for a step that is not recorded."""

import pytest

from octavo.kernels.triton.host import ceil_div, check, power_of_2


class Unprintable:
    def __format__(self, _: str) -> str:
        raise AssertionError("formatted for nothing")


def test_a_check_that_holds_puts_no_text_together() -> None:
    check(True, "a shape {}", Unprintable())
    with pytest.raises(ValueError, match="a shape 3 of 4"):
        check(False, "a shape {} of {}", 3, 4)


@pytest.mark.parametrize(
    ("number", "power"), [(1, 1), (2, 2), (3, 4), (96, 128), (128, 128), (129, 256)]
)
def test_the_next_power_of_two(number: int, power: int) -> None:
    assert power_of_2(number) == power


def test_quotients_are_rounded_up() -> None:
    assert [ceil_div(number, 4) for number in (0, 1, 4, 5)] == [0, 1, 1, 2]
