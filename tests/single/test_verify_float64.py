"""Everything inside `exact_precision` is float64, whatever the model names."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional

from autoshard.graph_capture.tracing.call_caches import attributes_put_back
from autoshard.verification.original.float64 import exact_precision, limits_of, widen, widened
from tests import forced


class Casts(nn.Module):
    """Casts in every way that models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.linear(x).float()).to(torch.bfloat16)
        x = x * torch.tensor(0.1, dtype=torch.float32) + torch.full((5,), 1 / 3, dtype=torch.float16)
        x = x + torch.arange(5, dtype=torch.float32) / 7 + torch.ones(5).half() / 3
        x = x + torch.zeros_like(x, dtype=torch.float32)
        x = torch.softmax(x, -1, dtype=torch.float32).type(torch.float16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = x @ torch.eye(5, dtype=torch.float32)
        return functional.log_softmax(x, -1, dtype=torch.bfloat16).sum(dtype=torch.float32)


def plain(model: Casts, x: torch.Tensor) -> torch.Tensor:
    """`Casts.forward` without a cast, in float64."""
    d = torch.float64
    x = model.norm(model.linear(x))
    x = (
        x * float(torch.tensor(0.1, dtype=torch.float32))
        + 1 / 3
        + torch.arange(5, dtype=d) / 7
        + torch.ones(5, dtype=d) / 3
    )
    return torch.log_softmax(torch.softmax(x, -1), -1).sum()


def model_and_input() -> tuple[Casts, torch.Tensor]:
    torch.manual_seed(0)
    return Casts().double(), torch.randn(4, 6, dtype=torch.float64)


def check() -> None:
    model, x = model_and_input()
    with exact_precision():
        loss = model(x)
        loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    assert loss.dtype == torch.float64
    model.zero_grad()
    expected = plain(model, x)
    expected.backward()
    assert abs(float((loss - expected).detach())) < 1e-13
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert gradient.dtype == torch.float64
        assert (gradient - parameter.grad).abs().max() < 1e-14


def test_forward_and_backward() -> None:
    check()


def test_it_matters() -> None:
    model, x = model_and_input()
    assert abs(float((model.float()(x.float()) - plain(model.double(), x)).detach())) > 1e-6


def test_numbers_in_the_code_are_those_of_the_model() -> None:
    """A capture holds 0.3 as float32 does; here it is that number too, also where float64 is what `x.dtype` gave."""
    rounded = torch.tensor(0.3).double()
    y = torch.zeros(4, dtype=torch.float64)
    with exact_precision():
        y[1] = 0.3
        tensors = [torch.tensor(0.3), torch.tensor([0.3], dtype=torch.float32)[0], y.new_tensor([0.3])[0], y[1]]
        tensors.append(torch.tensor(0.3, dtype=y.dtype))
        exact = [torch.full((), 0.3), torch.tensor(0.3j).imag]
        assert torch.tensor([2]).dtype == torch.int64
    assert all(torch.equal(x, rounded) for x in tensors)
    assert exact[0].item() == 0.3 and torch.equal(exact[1], rounded)
    with exact_precision(torch.bfloat16):
        y[1] = 0.3
    assert y[1] == torch.tensor(0.3, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("literal", "cast", "same"),
    [
        (torch.float32, lambda x: x.to(torch.float32), True),
        (torch.float32, lambda x: x.to("cpu", dtype=torch.float32), True),
        (torch.float32, lambda x: x.float(), True),
        (torch.float32, lambda x: x.type(torch.float32), True),
        (torch.float32, lambda x: x.to(torch.float32, copy=True), False),
        (torch.float32, lambda x: x.bfloat16(), False),
        (torch.bfloat16, lambda x: x.bfloat16(), True),
        (torch.bfloat16, lambda x: x.float(), False),
    ],
)
def test_a_cast_to_the_dtype_of_the_model_is_the_tensor_itself(
    literal: torch.dtype, cast: Callable[[torch.Tensor], torch.Tensor], same: bool
) -> None:
    """So a write in place after it is seen before it, as in the model. Under autocast nobody knows: it is a copy."""
    for aliases in (True, False):
        x = torch.zeros(2, dtype=torch.float64)
        with exact_precision(literal, aliases):
            cast(x).add_(1)
        assert x.dtype == torch.float64 and bool(x.all()) is (same and aliases)


def test_in_threads() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            check()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert torch.get_default_dtype() == torch.float32


def test_the_default_comes_back_after_an_error() -> None:
    with pytest.raises(ValueError), exact_precision():
        raise ValueError
    assert torch.ones(1).dtype == torch.float32


def test_bits_are_not_a_precision() -> None:
    with exact_precision():
        assert torch.ones(2, dtype=torch.int64).view(torch.int32).dtype == torch.int32


def test_widen() -> None:
    assert widen([torch.float32, {"dtype": torch.bfloat16}, 3]) == [torch.float64, {"dtype": torch.float64}, 3]
    assert widen((torch.int64, torch.bool)) == (torch.int64, torch.bool)
    ids, x = widened([torch.tensor([1]), torch.tensor([0.5])])
    assert ids.dtype == torch.int64 and x.dtype == torch.float64


class Gumbel(torch.nn.Module):
    """torch's own draws it between the least and the largest numbers of a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.first(x)
        zero = torch.zeros((), dtype=scores.dtype)
        noise = torch.distributions.Gumbel(zero, zero + 1).sample(scores.shape)
        return ((scores + noise).softmax(-1) * torch.finfo(scores.dtype).eps * 1e6).square().sum()


def gumbel() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return Gumbel(), (torch.randn(8, 8),)


def test_limits_of_a_dtype_are_those_that_a_capture_holds() -> None:
    _, largest = forced.check(f"{__file__}:gumbel", "dp=2", lambda *_: True, (1,))
    assert largest < 1e-9
    finfo = torch.finfo
    with limits_of(torch.float32):
        assert torch.finfo(torch.float64).eps == torch.finfo(torch.float32).eps
        with ThreadPoolExecutor() as pool:
            assert pool.submit(lambda: torch.finfo(torch.float64).eps).result() == 2**-52
    assert torch.finfo is finfo


@functools.lru_cache
def thirds(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) / 3


def hidden(function: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
    cached = functools.lru_cache(function)

    def call(count: int) -> torch.Tensor:
        return cached(count)

    return call


@hidden
def sevenths(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) / 7


@functools.cache
def named(count: int) -> list[str]:
    return [str(count)]


class Caches(nn.Module):
    @functools.lru_cache  # noqa: B019
    def ninths(self, count: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.float32) / 9

    def forward(self) -> torch.Tensor:
        return thirds(4) + sevenths(4) + self.ninths(4)


def test_what_the_models_functions_cache_has_the_precision_of_the_run() -> None:
    model, expected = Caches(), torch.arange(4, dtype=torch.float64) * (1 / 3 + 1 / 7 + 1 / 9)
    assert (model() - expected).abs().max() > 1e-9
    with attributes_put_back(model), exact_precision():
        assert (model() - expected).abs().max() < 1e-15
    assert model().dtype == torch.float32
    cached = named(4)
    with attributes_put_back(model):
        assert named(4) is cached  # no tensor
