from __future__ import annotations

import pytest

from nvfp4.architectures import (
    ARCHITECTURES,
    arch_of,
    architectures_of,
    capability,
    check_supported,
)
from nvfp4.errors import UnsupportedError

from .programs import CHAIN, MULTIPLY, UNBOUNDED


def test_every_target_has_its_compute_capability() -> None:
    assert [capability(arch) for arch in ARCHITECTURES] == [
        (8, 0, ""), (8, 6, ""), (8, 9, ""), (9, 0, "a"),
        (10, 0, "a"), (10, 3, "a"), (12, 0, "a"), (12, 1, "a"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cc", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
        ((12, 1), "sm_121a"),
    ],
)
def test_a_card_gets_the_newest_target_whose_code_it_runs(cc: tuple[int, int], arch: str) -> None:
    assert arch_of(cc) == arch


@pytest.mark.parametrize("cc", [(7, 5), (9, 1), (10, 1), (11, 0), (12, 2), (13, 0)])
def test_a_card_that_runs_no_target_is_refused_by_its_capability(cc: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedError, match=rf"{cc[0]}\.{cc[1]}"):
        arch_of(cc)


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"sm_80, sm_86.*got 'sm_90'"):
        capability("sm_90")


def test_a_kernel_is_for_the_targets_from_its_smallest_capability_on() -> None:
    assert architectures_of(MULTIPLY) == ARCHITECTURES
    assert architectures_of(CHAIN) == ARCHITECTURES[3:]
    assert architectures_of(UNBOUNDED) == ("sm_90a",)


def test_a_kernel_on_the_wrong_target_names_the_right_ones() -> None:
    check_supported(CHAIN, "sm_90a")
    with pytest.raises(UnsupportedError, match=r"chain is made for sm_90a, .*got sm_89"):
        check_supported(CHAIN, "sm_89")
    with pytest.raises(UnsupportedError, match="unbounded is made for sm_90a; got sm_100a"):
        check_supported(UNBOUNDED, "sm_100a")
