"""Calls like one before with PyTorch's tensors, which have states that other arrays have not.

Their metadata are compared by the guards of ``torch.compile`` where there are such, else in Python;
here by stubs of both. What PyTorch's own guards tell apart is tested in tests/interop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import nvfp4
from nvfp4.api import _looks, _repeat

from . import stubs
from .conftest import Card
from .repeated import Made, known, outcome, values


class Guards:
    """``torch._C._dynamo.guards.TensorGuards``, with all that is unexpected in it."""

    made = 0

    def __init__(self, *tensors: stubs.Tensor) -> None:
        Guards.made += 1
        self.wanted = [self.look(tensor) for tensor in tensors]

    @staticmethod
    def look(tensor: stubs.Tensor) -> tuple[Any, ...]:
        return (
            type(tensor),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.get_device(),
            tensor.negated,
            tensor.requires_grad,  # whatever the grad mode
        )

    def check(self, *tensors: stubs.Tensor) -> bool:
        if len(tensors) != len(self.wanted):
            raise TypeError("wrong length")
        once = len({*map(id, tensors)}) == len(tensors)
        return once and [*map(self.look, tensors)] == self.wanted


@pytest.fixture(params=["guards", "python"])
def there(
    torch: stubs.Torch, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[np.ndarray], stubs.Tensor]:
    """What puts an array on the pretended card."""
    Guards.made = 0
    if request.param == "guards":
        monkeypatch.setattr(_looks, "_guards", lambda module: Guards)
    else:
        assert _looks._guards(torch) is None
    return lambda x: stubs.Tensor(torch, np.array(x, order="C"), "cuda:0")


def product(there: Callable[[np.ndarray], stubs.Tensor]) -> Made:
    """A product with four tensors and one of an epilogue."""
    offsets = there(np.array([0, 2, 5], np.int32))
    return Made(
        nvfp4.grouped_matmul,
        {
            "a": there(values(5, 64).astype(np.float16)),
            "b": nvfp4.quantize(there(values(2, 32, 64)), "mxfp4"),
            "row_offsets": offsets,
            "row_indices": there(np.array([4, 3, 2, 1, 0])),
            "epilogue": nvfp4.epilogues.bias(there(values(32))),
            "out": there(np.zeros((5, 32), np.float32)),
            "out_dtype": "float32",
        },
    )


def tensors(call: Made) -> list[stubs.Tensor]:
    given = [*call.arguments.values(), *call.arguments["epilogue"].arrays]
    return [value for value in given if isinstance(value, stubs.Tensor)]


def _rows_at_once(tensor: stubs.Tensor) -> tuple[int, ...]:
    return 0, *tensor.values.strides[1:]


#: What may happen to a tensor in place, at its address but for the first.
IN_PLACE: dict[str, Callable[[stubs.Tensor], None]] = {
    "other memory": lambda t: setattr(t, "values", t.values.copy()),
    "another dtype": lambda t: setattr(t, "values", t.values.view(np.int16)),
    "one row less": lambda t: setattr(t, "values", t.values[:-1]),
    "an axis more": lambda t: setattr(t, "values", t.values[None]),
    "other strides": lambda t: setattr(t, "values", as_strided(t.values, strides=_rows_at_once(t))),
    "transposed": lambda t: setattr(t, "values", t.values.T),
    "another device": lambda t: setattr(t, "device", stubs.Device("cuda", 1)),
    "the host": lambda t: setattr(t, "device", stubs.Device("cpu", None)),
    "requires grad": lambda t: setattr(t, "requires_grad", True),
    "negated": lambda t: setattr(t, "negated", True),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_what_happened_to_a_tensor_in_place_is_noticed(
    card: Card, there: Callable[[np.ndarray], stubs.Tensor], change: str
) -> None:
    call = product(there)
    noticed = 0
    for tensor in tensors(call):
        known(card, call)
        before = dict(vars(tensor))
        usual = outcome(card, call)
        IN_PLACE[change](tensor)
        after = outcome(card, call)
        again = outcome(card, call)
        _repeat.forget()
        assert after == again == outcome(card, call)
        noticed += after != usual
        vars(tensor).update(before)
        assert outcome(card, call) == usual
        _repeat.forget()
    assert noticed == (2 if change == "transposed" else 5)  # which are of two axes


def test_guards_are_what_compares_tensors(
    card: Card, there: Callable[[np.ndarray], stubs.Tensor], request: pytest.FixtureRequest
) -> None:
    call = product(there)
    known(card, call)
    assert (Guards.made > 0) == (request.node.callspec.params["there"] == "guards")


@pytest.mark.parametrize("position", range(5))
def test_a_call_made_without_grad_is_refused_with_grad(
    card: Card,
    torch: stubs.Torch,
    there: Callable[[np.ndarray], stubs.Tensor],
    position: int,
) -> None:
    call = product(there)
    tensor = tensors(call)[position]
    tensor.requires_grad, torch.grad_enabled = True, False
    known(card, call)
    torch.grad_enabled = True
    for _ in range(2):
        with pytest.raises(ValueError, match="requires grad"):
            call()
    tensor.requires_grad = False
    known(card, call)
    tensor.requires_grad = True
    with pytest.raises(ValueError, match="requires grad"):
        call()
    tensor.requires_grad, tensor.negated = False, True
    with pytest.raises(ValueError, match="resolve_neg"):
        call()


def test_a_tensor_that_is_given_twice_is_known(
    card: Card, there: Callable[[np.ndarray], stubs.Tensor]
) -> None:
    x = there(values(3, 64).astype(np.float16))
    ids = there(np.array([1, 0, 2]))
    out = nvfp4.grouped_quantize(
        x, "nvfp4", row_offsets=there(np.array([0, 1, 2, 3], np.int32)), row_indices=ids
    )
    call = Made(
        nvfp4.grouped_quantize,
        {"x": x, "format": "nvfp4", "row_offsets": out.groups, "expert_ids": ids,
         "row_indices": ids, "out": out},
    )  # fmt: skip
    known(card, call)
    call(row_indices=stubs.Tensor(x._torch, ids.values, "cuda:0"))
    kept = dict(_repeat._calls)
    call()
    call()
    assert len(card.planned) == 2
    assert _repeat._calls == kept


def test_strides_of_axes_of_one_cost_a_place_but_no_plan(
    card: Card, torch: stubs.Torch, there: Callable[[np.ndarray], stubs.Tensor]
) -> None:
    """PyTorch's guards look at them; what is launched does not depend on them."""
    wide = there(values(3, 64).astype(np.float16))
    one = stubs.Tensor(torch, wide.values[:1], "cuda:0")
    other = stubs.Tensor(torch, wide.values[::2][:1], "cuda:0")
    assert one.stride() != other.stride()
    b = nvfp4.quantize(there(values(32, 64)), "mxfp4")
    out = there(np.zeros((1, 32), np.float32))
    call = Made(nvfp4.matmul, {"a": one, "b": b, "out": out, "out_dtype": "float32"})
    usual = outcome(card, call)
    assert outcome(card, call, a=other) == usual
    kept = dict(_repeat._calls)
    for a in (one, other, one):
        assert outcome(card, call, a=a) == usual
    assert _repeat._calls == kept
    assert len(card.planned) == 2  # and the quantisation of b


def test_a_subclass_of_tensors_is_no_other_class(
    card: Card, there: Callable[[np.ndarray], stubs.Tensor]
) -> None:
    class Parameter(stubs.Tensor):
        pass

    Parameter.__module__ = "torch"
    call = product(there)
    a = call.arguments["a"]
    usual = outcome(card, call)
    for _ in range(3):
        other = Parameter(a._torch, a.values, "cuda:0")
        assert outcome(card, call, a=other) == usual
        assert outcome(card, call) == usual
