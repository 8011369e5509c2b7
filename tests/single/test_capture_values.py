"""A captured graph computes the model's own loss, gradients and buffers, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.errors import CaptureError
from autoshard.graph_capture.capture import capture, capture_model
from autoshard.graph_capture.load_model import load_model, verify_arguments
from autoshard.graph_capture.training.precision import result_dtype
from autoshard.ir import graph_json
from autoshard.ir.graph import Graph, Tensor
from tests.interpreter import run
from tests.slow import quick_at


def randomise(model: nn.Module) -> nn.Module:
    """No zero bias, no unit norm: such values hide faults."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            if value.dtype.is_floating_point:
                value.copy_(torch.rand(value.shape, generator=generator, dtype=torch.float64) * 0.5 + 0.1)
                value.mul_(
                    torch.where(torch.rand(value.shape, generator=generator) < 0.5, -1.0, 1.0)
                    if value.dim() > 1
                    else 1.0
                )
    return model.double()


class Double(TorchDispatchMode):
    """Casts that a model writes to float32 go to float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def compare(graph: Graph, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Loss, every parameter's gradient and every buffer after the forward: model against graph."""
    model = randomise(model).train(graph.training)
    inputs = tuple(value.double() if value.dtype.is_floating_point else value for value in inputs)
    stored = dict([*model.named_parameters(), *model.named_buffers()])
    values = dict(zip(graph.inputs, inputs, strict=True))
    values |= {p.tensor: stored[p.path].detach().clone() for p in graph.parameters + graph.buffers}
    leaves = {p.path: values[p.tensor].requires_grad_() for p in graph.parameters if p.trainable}
    outs = run(graph, values)
    with Double():
        expected = model(*inputs)
    expected = expected if isinstance(expected, torch.Tensor) else expected.loss
    assert graph.loss is not None
    torch.testing.assert_close(outs[graph.loss], expected, rtol=1e-12, atol=1e-12)
    expected.backward()
    outs[graph.loss].backward()
    for path, leaf in leaves.items():
        close(leaf.grad, stored[path].grad, path)
    buffers = {buffer.tensor: buffer.path for buffer in graph.buffers}
    updates = {buffers[tensor]: outs[value] for tensor, value in graph.buffer_updates}
    for path, buffer in model.named_buffers():
        close(updates.get(path, values[f"b_{path.replace('.', '_')}"]), buffer, path)


def close(actual: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    if expected is None:
        assert actual is None, what
        return
    assert actual is not None, what
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("name", quick_at(["mlp", "lenet", "gpt2"], 0))
def test_example_computes_the_model(name: str) -> None:
    spec = f"examples/{name}.py:build"
    arguments = verify_arguments(spec) | ({"dropout": 0.0} if name == "gpt2" else {})
    model, inputs = load_model(spec, arguments, device="cpu")
    compare(capture(spec, arguments), model, inputs)


def test_tied_weight_is_one_parameter_whose_gradient_is_the_sum() -> None:
    graph = capture("examples/gpt2.py:build", verify_arguments("examples/gpt2.py:build"))
    tied = [p for p in graph.parameters if p.ties]
    assert [(p.path, p.ties) for p in tied] == [("transformer.wte.weight", ("lm_head.weight",))]
    assert [op.target for op, _ in graph.consumers[tied[0].tensor]] == ["aten.embedding", "aten.linear"]


class Normalised(nn.Module):
    """Batch norm whose statistics, and more, change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding="same")
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x))
        x += 0.25
        x = x.relu_()
        self.calls[1] += 2.0
        self.calls.mul_(2.0)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), target)


class Writer(nn.Module):
    """In-place writes through every kind of view that is followed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        before = y * 1.0
        row, flat = y[1], y.view(-1)
        y[:, 0] = 1.5
        y[:, 1:3].mul_(2.0)
        y.t()[4].add_(before[:, 2])
        y.permute(1, 0)[5].copy_(before[:, 3])
        flat[3:5].zero_()
        y.unsqueeze(0).transpose(1, 2).tanh_()
        z = torch.zeros_like(y)
        z[2:] = y[2:]
        z.masked_fill_(y > 0.5, 0.125)
        z.clamp_(min=-0.5)
        return (row * 3).sum() + (flat * before.reshape(-1)).sum() + z.pow(2).sum() + y.square().mean()


class Frozen(nn.Module):
    """No-grad regions, detached values, literals, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.no_grad():
            scale = y.abs().amax(-1, keepdim=True) + torch.tensor([0.5, 1.0, 1.5, 2.0])
        z = self.second(y / scale) + y.detach() * torch.tensor(3.0)
        return (z**2).mean() + z.flatten().std()


@dataclass
class Returned:
    loss: torch.Tensor
    scores: torch.Tensor


class Twin(nn.Module):
    """Two inputs, one dataclass out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Returned:
        scores = self.layer(a.flatten(0, 1)).unflatten(0, a.shape[:2])
        return Returned(((scores - b) ** 2).mean(), scores)


def test_batch_norm_statistics_are_buffer_updates() -> None:
    inputs = (torch.randn(4, 3, 6, 6), torch.randint(0, 5, (4,)))
    graph = capture_model(Normalised(), inputs)
    assert len(graph.buffer_updates) == 4
    compare(graph, Normalised(), inputs)


def test_batch_norm_in_eval_updates_nothing() -> None:
    class Evaluated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(nn.functional.dropout(x, 0.5, self.training)).sum()

    graph = capture_model(Evaluated(), (torch.randn(3, 4),), training=False)
    assert [op.target for op in graph.ops] == ["aten.batch_norm", "aten.sum"]
    assert graph.buffer_updates == () and not any(tensor.requires_grad for tensor in graph.tensors)


@pytest.mark.parametrize(
    "make, shapes", quick_at([(Writer, [(5, 4)]), (Frozen, [(3, 4)]), (Twin, [(2, 4, 3), (2, 4, 3)])], 0)
)
def test_awkward_models(make: type[nn.Module], shapes: list[tuple[int, ...]]) -> None:
    inputs = tuple(torch.randn(shape) for shape in shapes)
    double = tuple(value.double() for value in inputs)
    compare(capture_model(make().double(), double), make(), inputs)


def test_one_tensor_for_two_inputs_is_not_merged() -> None:
    x = torch.randn(2, 4, 3)
    graph = capture_model(Twin(), (x, x))
    assert graph.inputs == ("a", "b") and all(graph.consumers[name] for name in graph.inputs)
    compare(graph, Twin(), (x, torch.randn(2, 4, 3)))


def test_capture_leaves_the_model_as_it_was() -> None:
    model = Twin().eval()
    before = {name: (value, value.clone()) for name, value in model.named_parameters()}
    capture_model(model, (torch.randn(2, 4, 3), torch.randn(2, 4, 3)))
    assert not model.training
    for name, value in model.named_parameters():
        assert value is before[name][0] and torch.equal(value, before[name][1])


@pytest.mark.parametrize("name", quick_at(["mlp", "lenet", "gpt2"], 1))
def test_mixed_precision_graph_has_the_dtypes_torch_gives(name: str) -> None:
    spec = f"examples/{name}.py:build"
    arguments = verify_arguments(spec) | ({"dropout": 0.0} if name == "gpt2" else {})
    model, inputs = load_model(spec, arguments, device="cpu")
    graph = capture(spec, arguments, "bf16-mixed")
    values = dict(zip(graph.inputs, inputs, strict=True))
    values |= {p.tensor: dict(model.named_parameters())[p.path].detach() for p in graph.parameters}
    outs = run(graph, values)
    assert {n: str(v.dtype).removeprefix("torch.") for n, v in outs.items()} == {t.name: t.dtype for t in graph.tensors}
    assert graph.loss is not None
    torch.testing.assert_close(outs[graph.loss], model(*inputs), rtol=0.03, atol=0.01)


def test_mixed_precision_promotes_as_torch_does() -> None:
    for kinds in ((torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16), (torch.int64, torch.bfloat16)):
        for shapes in (((2,), (2,)), ((2,), ()), ((), (2,)), ((), ())):
            tensors = [torch.ones(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
            described = [Tensor("t", tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors]
            assert result_dtype(described) == str(torch.result_type(*tensors)).removeprefix("torch."), (kinds, shapes)


class Clicks(nn.Module):
    """Fields of 20 rows each in one table, and a probability as the target."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.arange(5) * 20)
        self.rows = nn.Embedding(100, 1)

    def forward(self, fields: torch.Tensor, clicks: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        logits = self.rows(fields + self.offsets).sum((1, 2)) + noise
        return nn.functional.binary_cross_entropy_with_logits(logits, clicks)


def clicks() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Clicks(), (torch.randint(0, 20, (64, 5)), torch.rand(64), torch.randn(64))


def test_synthetic_numbers_keep_to_the_example() -> None:
    """Also where the example was made on meta: by the calls that made it."""
    for graph in (capture_model(*clicks()), capture(f"{__name__}:clicks", {})):
        ranges = {bound.tensor: (bound.low, bound.high) for bound in graph.input_ranges}
        assert ranges == {"clicks": (0, 1)}
        (fields,) = graph.column_ranges
        assert fields.tensor == "fields" and all(0 <= low < 5 < 15 < high <= 20 for low, high in fields.bounds)
        assert graph_json.loads(graph_json.dumps(graph)) == graph


@pytest.mark.parametrize("how", ["in place", "replaced", "replaced, and the model's own"])
def test_a_buffer_of_an_inner_module_is_written(how: str) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, new = x * self.kept.clone(), self.kept * 0.5 + 0.5 * x.detach().mean(0)
            if how == "in place":
                self.kept.copy_(new)
            else:
                self.kept = new
            return y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.scale = nn.Linear(6, 4), Scale()
            self.register_buffer("count", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if how.endswith("own"):
                self.count = self.count + 1
            return self.scale(self.a(x)).square().mean()

    graph = capture_model(Model(), (torch.randn(8, 6),))
    paths = {b.tensor: b.path for b in graph.buffers}
    updated = {paths[buffer] for buffer, _ in graph.buffer_updates}
    assert updated == {"scale.kept", *(["count"] if how.endswith("own") else [])}


def test_a_loss_of_trained_tensors_without_elements_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.empty = nn.Linear(5, 2).requires_grad_(False), nn.Parameter(torch.empty(0, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat((self.a(x), self.empty)).square().mean()

    with pytest.raises(CaptureError, match="no trainable parameter contributes to the loss, but tensors without"):
        capture_model(Model(), (torch.randn(4, 5),))


class NormedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return nn.functional.batch_norm(x, self.norm.running_mean, self.norm.running_var).sum()


def test_a_result_is_not_named_as_another_operator() -> None:
    """The first norm has three results, and the node of the second is `batch_norm_1`."""
    graph = capture_model(NormedTwice(), (torch.randn(4, 8),))
    results = [name for op in graph.ops for name in op.results]
    assert len(results) == len(set(results)) == 6
