"""What repeated calls notice of PyTorch's own tensors, here on the CPU.

Two tensors that differ in anything that calls depend on differ in address or are told apart by the
comparison of metadata, which is that of ``torch.compile``'s guards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from nvfp4.api import _looks

Remembered = Callable[[], bool]


@pytest.fixture(autouse=True, params=["guards", "python"])
def comparison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The comparison by PyTorch, and the one that takes its place where it is missing."""
    _looks.learn(torch.Tensor, "torch")
    _looks.learn(torch.nn.Parameter, "torch")
    if request.param == "python":
        monkeypatch.setattr(_looks, "_guards", lambda module: None)
    return str(request.param)


def remembered(*tensors: torch.Tensor) -> Callable[..., bool]:
    """What tells whether a call with other tensors counts as one with these, as of now."""
    addresses = [_looks.LOOKS[type(tensor)](tensor) for tensor in tensors]
    compared = _looks.watched(tensors)
    assert compared is not None
    pick, _, facts, wanted = compared

    def again(*others: torch.Tensor) -> bool:
        others = others or tensors
        if [_looks.LOOKS[type(tensor)](tensor) for tensor in others] != addresses:
            return False
        if facts is None:
            return bool(wanted(*pick(others)))
        try:
            return [*map(facts, pick(others))] == wanted
        except ValueError:  # which calls refuse
            return False

    return again


def matrix() -> torch.Tensor:
    return torch.arange(24.0).reshape(4, 6)


def test_this_version_has_guards_that_can_be_used(comparison: str) -> None:
    assert (_looks._guards(torch) is not None) == (comparison == "guards")


def _moved(x: torch.Tensor, like: torch.Tensor) -> None:
    x.data = like


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "set_ to other memory": lambda x: x.set_(matrix()),
    "set_ to a part": lambda x: x.set_(x.untyped_storage(), 0, (3, 6)),
    "set_ to the rest": lambda x: x.set_(x.untyped_storage(), 1, (3, 6)),
    "set_ to other strides": lambda x: x.set_(x.untyped_storage(), 0, (4, 6), (1, 4)),
    "data of other memory": lambda x: _moved(x, matrix()),
    "data of another shape": lambda x: _moved(x, x.detach().view(6, 4)),
    "data of another dtype": lambda x: _moved(x, x.detach().view(torch.int32)),
    "data that are the transpose": lambda x: _moved(x, x.detach().reshape(6, 4).t()),
    "resize_": lambda x: x.resize_(3, 6),
    "resize_ to more": lambda x: x.resize_(400, 600),
    "as_strided_": lambda x: x.as_strided_((4, 6), (0, 1)),
    "t_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "requires_grad_": lambda x: x.requires_grad_(),
}


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_what_happened_in_place_is_noticed(
    change: str, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    for position in range(3):
        with mode():
            tensors = [matrix(), torch.ones(4, dtype=torch.int64), torch.zeros(())]
            tensors.insert(position, matrix())
            again = remembered(*tensors)
            assert again()
            tensors[position].fill_(3)
            assert again()
            IN_PLACE[change](tensors[position])
            if change != "requires_grad_":
                assert not again()
        assert not again()


def _others(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Tensors at the address of one, different from it in one thing each."""
    yield x[:3]
    yield x[:, :5]
    yield x[None]
    yield x.view(6, 4)
    yield x.view(torch.int32)
    yield x.view(torch.float16)
    yield x.as_strided((4, 6), (0, 1))
    yield x.as_strided((4, 6), (1, 4))
    yield x.detach().requires_grad_()
    yield torch._neg_view(x)
    yield torch.nn.Parameter(x)


def test_others_at_the_same_address_are_told_apart() -> None:
    x = matrix()
    others = [*_others(x)]
    for one in (x, *others[:8]):
        again = remembered(one)
        assert [again(other) for other in (x, *others)] == [one is other for other in (x, *others)]
    assert remembered(x)(x.view(4, 6))


def test_a_lazily_negated_number_is_told_apart() -> None:
    """Both are contiguous, of one shape, and begin at one address."""
    z = torch.ones((1,), dtype=torch.complex64)
    again = remembered(z.imag)
    assert again(z.imag)
    assert z.conj().imag.is_neg()
    assert not again(z.conj().imag)


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_what_was_made_without_grad_is_not_used_with_grad(kind: type) -> None:
    x = matrix().requires_grad_() if kind is torch.Tensor else torch.nn.Parameter(matrix())
    with torch.no_grad():
        again = remembered(matrix()[:1], x)
    assert not again()
    with torch.no_grad():
        again = remembered(x, x.detach())
        assert again()
    assert not again()
    assert not again(x, x)


def test_a_tensor_given_twice_is_remembered() -> None:
    x = matrix()
    again = remembered(x, x)
    assert again()
    assert again(x, x.view(4, 6))
    assert not again(x, x.view(6, 4))
