"""What a forward means beyond its operators: kept (verified under a random plan) or refused by its line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.errors import CaptureError
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture, capture_model
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.search.fixed_styles import random_plan
from autoshard.verification import check_files, make_case
from tests.slow import quick_at, thinned
from tests.written_models import END, spec_of

# name -> (constructor, forward)
KEPT = {
    "gradient reversal": ("", f"h = Reverse.apply(self.a(x), 0.5)\n{END}"),
    "straight through": ("", f"h = Step.apply(self.a(x))\n{END}"),
    "a Function that is the derivative": ("", f"h = Swish.apply(self.a(x))\n{END}"),
    "a product with setup_context": ("", f"h = Product.apply(x, self.a.weight)\n{END}"),
    "a Function that weighs by a parameter": (
        "self.w = nn.Parameter(torch.ones(8))", f"h = Weighed.apply(self.a(x), [self.w])\n{END}",
    ),
    "a region of torch's own": ("", "h = self.a(x)\nreturn F.gaussian_nll_loss(h, h * 2, h.exp(), eps=1)"),
    "a hook that scales": ("", f"h = self.a(x)\nh.register_hook(lambda g: g * 0.5)\n{END}"),
    "a hook on infinite scores": (
        "",
        "h = self.a(x)\nh = h.masked_fill(h > 0.5, -torch.inf)\nh.register_hook(lambda g: g * 0.5)\n"
        f"h = h.softmax(-1)\n{END}",
    ),
    "a hook that looks": ("seen = []\nself.seen = seen.append", f"h = self.a(x)\nh.register_hook(self.seen)\n{END}"),
    "two hooks": ("", f"h = self.a(x).tanh()\nfor s in (-1, 3):\n    h.register_hook(lambda g, s=s: g * s)\n{END}"),
    "retained gradient": ("", f"h = self.a(x)\nh.retain_grad()\n{END}"),
    "a reentrant checkpoint": ("", f"h = checkpoint(torch.tanh, self.a(x), use_reentrant=True)\n{END}"),
    "a checkpoint": ("", f"h = checkpoint(torch.tanh, self.a(x), use_reentrant=False)\n{END}"),
    "saved on the CPU": ("", f"with torch.autograd.graph.save_on_cpu():\n    h = self.a(x).tanh()\n{END}"),
    "a checkpoint of an input": ("", f"h = checkpoint(self.a, x, use_reentrant=True)\n{END}"),
    "autocast off": ("", f"with torch.autocast('cuda', enabled=False):\n    h = self.a(x)\n{END}"),
    "autocast off, where only the size of a part is read": (
        "",
        "h = self.a(x)\nn = h[1:].shape[0] + 1\nwith torch.autocast('cuda', enabled=False):\n"
        f"    s, c = x.sum() * n, h[1:].new_ones(8)\nh = h * s + c\n{END}",
    ),
    "a write in place after a cast to what it is": (
        "",
        "h = self.a(x)\nh.to(torch.float32).mul_(torch.empty_like(h).uniform_(0.9, 1.1))\n"
        f"g = h.float()\ng[1:] += 1\nh.type(dtype=torch.float32).tanh_()\n{END}",
    ),
    "a write in place after a cast that copies": (
        "",
        "h = self.a(x)\nc = h.to(torch.float32, copy=True).mul_(2)\nb = h.bfloat16()\nb += 100\n"
        f"h = h + c + self.a(x).to(torch.int64).float().add_(1)\n{END}",
    ),
    "writes in place into what is a view by its strides": (
        "",
        "h = self.a(x)\nh[:, ::2].reshape(4, 2, 2).mul_(2)\nh[:, 1:].reshape(-1).mul_(3)\nh.t().contiguous().mul_(5)\n"
        f"h.type_as(x).add_(1)\nh.t().ravel().add_(7)\nF.dropout(h, 0.5, False).exp_()\n"
        f"h.view(4, 2, 2, 2).contiguous(memory_format=torch.channels_last).mul_(2)\n{END}",
    ),
    "tensors made in others": (
        "",
        "e = torch.eye(*x.shape, out=torch.empty_like(x))\nr = torch.arange(6, out=torch.empty(6))\n"
        "s = torch.linspace(0, 1, 8, out=torch.empty(8, dtype=torch.float64)).float()\n"
        f"h = self.a(x + e + r) + s\n{END}",
    ),
    "a rate of 0 that is drawn for": (
        "",
        "h = self.a(x)\nif torch.rand(1) > 0.0 and 1.0 > torch.rand(()) and not torch.empty(1).uniform_() < 0:\n"
        f"    h = h.tanh()\n{END}",
    ),
    "a cached size": ("self.rows = 0", f"self.rows = max(self.rows, x.shape[0])\nh = self.a(x) / self.rows\n{END}"),
    "a counter that is only counted": ("self.calls = 0", f"self.calls += 1\nh = self.a(x)\n{END}"),
    "the loss beside another scalar": ("", "h = self.a(x)\nreturn {'size': h.abs().mean(), 'loss': self.b(h).mean()}"),
    "the loss beside a metric": ("", "h = self.b(self.a(x))\nreturn h.detach().abs().mean(), h.square().mean()"),
    "a frozen norm": ("self.n = nn.BatchNorm1d(8)\nself.n.train = lambda _: self.n", f"h = self.n(self.a(x))\n{END}"),
    "a forward hook": ("self.a.register_forward_hook(lambda m, a, out: out * 2)", f"h = self.a(x)\n{END}"),
    "a dtype set for a while": (
        "",
        f"torch.set_default_dtype(torch.float64)\nt = torch.ones(8)\ntorch.set_default_dtype(torch.float32)\n"
        f"h = self.a(x) * t.float()\n{END}",
    ),
    "no gradient in a region": ("", f"with torch.no_grad():\n    m = self.a(x).abs().mean()\nh = self.a(x) / m\n{END}"),
    "a part in inference mode": ("",
        f"with torch.inference_mode():\n    m = self.a(x)\nh = self.a(x) / m.clone()\n{END}"),
    "gradients asked for in inference mode": ("",
        "with torch.inference_mode():\n    with torch.enable_grad():\n        m = self.a(x)\n"
        f"    torch.set_grad_enabled(True)\n    k = self.a(x) + 2\nh = self.a(x) / m.clone() / k.clone()\n{END}"),
    "gradients in inference mode": ("",
        "with torch.inference_mode():\n    m = self.a(x)\n    with torch.inference_mode(False):\n"
        "        h = self.a(x)\n"
        f"h = h / (2 + m.clone().abs())\n{END}"),
    "a frozen parameter": ("self.a.requires_grad_(False)", f"h = self.a(x)\n{END}"),
    "a plain tensor": ("self.scale = torch.linspace(0.5, 2, 8)", f"h = self.a(x) * self.scale\n{END}"),
    "a plain tensor that changes": (
        "self.mean = torch.zeros(8)",
        f"h = self.a(x)\nself.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)\nh = h - self.mean\n{END}",
    ),
    "a plain tensor written to": ("self.t = torch.ones(8)", f"self.t.mul_(2.0)\nh = self.a(x) * self.t\n{END}"),
    "a large plain tensor": ("self.table = torch.rand(900, 8)", f"h = self.a(x) * self.table[:4]\n{END}"),
    "a list of tensors": ("self.ts = [torch.ones(8) * 3, torch.arange(8.0)]", f"h = self.a(x) * self.ts[1]\n{END}"),
    "a read of .data": ("", f"h = self.a(x)\nh = h * h.data.abs().amax()\n{END}"),
    "a write that autograd does not see": ("", f"h = self.a(x)\nh.detach()[1].mul_(2.0)\n{END}"),
    "a write without gradient": ("", f"h = self.a(x)\nwith torch.no_grad():\n    h.mul_(2.0)\n    h[0] = 0.5\n{END}"),
    "spectral norm": ("nn.utils.spectral_norm(self.a)", f"h = self.a(x)\n{END}"),
    "spectral norm as a parametrisation": ("nn.utils.parametrizations.spectral_norm(self.a)", f"h = self.a(x)\n{END}"),
    "a bool buffer that changes": (
        "self.register_buffer('seen', torch.zeros(8, dtype=torch.bool))",
        f"h = self.a(x)\nself.seen |= (h > 1).any(0)\nh = h.masked_fill(self.seen, 0.0)\n{END}",
    ),
    "a bool output": ("", "h = self.a(x)\nreturn self.b(h).square().mean(), h > 0"),
    "a lazy layer": ("self.a = nn.LazyLinear(8)", f"h = self.a(x)\n{END}"),
    "rotary embedding by complex numbers": (
        "angles = torch.outer(torch.arange(9.0), torch.tensor([1.0, 0.3, 0.1, 0.01]))\n"
        "self.turns = torch.polar(torch.ones_like(angles), angles)",
        "self.turns = self.turns.to(x.device)\nh = self.a(x)\n"
        "pairs = torch.view_as_complex(h.float().reshape(*h.shape[:-1], -1, 2))\n"
        f"h = torch.view_as_real(pairs * self.turns[:4].view(1, 4, 4)[0]).flatten(1).type_as(h)\n{END}",
    ),
    "complex arithmetic": (
        "self.register_buffer('w', torch.complex(torch.rand(4), torch.rand(4)))",
        "h = torch.view_as_complex(self.a(x).view(4, 4, 2))\n"
        "h = h * self.w.conj() + h / (self.w + torch.complex(x[:, :4], x[:, 2:]))\n"
        "h = h * (2 - 0.5j) - torch.exp(1j * h.real)\n"
        "h = torch.cat([h.transpose(0, 1)[1:], h.unsqueeze(-1).sum(-1)[:1] * x[0, 0]])\n"
        f"h = torch.cat([h.abs(), h.imag * h.angle()], -1)\n{END}",
    ),
    "complex sums and rolls over all dims": ("",
        "h = torch.view_as_complex(self.a(x).view(4, 4, 2))\n"
        "h = h.roll(3) * torch.sum(h, dim=[]) + h.roll(1, 0) * h.mean() + torch.sum(h, dim=[], keepdim=True)\n"
        f"h = torch.cat([h.real, h.imag], -1)\n{END}"),
    "an LSTM with dropout": ("self.r = nn.LSTM(8, 8, 3, dropout=0.3)",
        f"h, (last, cell) = self.r(self.a(x).unsqueeze(1))\nh = h + last.sum(0) * cell[1]\n{END}"),
    "a GRU both ways with dropout": ("self.r = nn.GRU(8, 4, 2, dropout=0.3, bidirectional=True, batch_first=True)",
        f"h, last = self.r(self.a(x).view(2, 2, 8))\nh = h * last.sum()\n{END}"),
    "a plain recurrence with dropout": ("self.r = nn.RNN(8, 8, 2, dropout=0.5, bias=False)",
        f"h, _ = self.r(self.a(x).unsqueeze(1))\n{END}"),
    "strides of one's own": ("",
        f"h = self.a(x).view(2, 2, 8).transpose(0, 1)\nh = h.as_strided((3, 8), (4, 1))\n{END}"),
    "an embedding with sparse gradients": (
        "self.e = nn.Embedding(9, 8, sparse=True)", f"h = self.a(x) * self.e((x[:, 0] > 0).long() * 3)\n{END}",
    ),
    "a buffer that is filled": ("self.register_buffer('on', torch.zeros(3))",
        f"self.on.fill_(2)\nself.on[:1] = torch.ones(1)\nh = self.a(x)\n{END}"),
    "a module moved to where it is": ("", f"self.a.to(x.device)\nh = self.a.to(torch.float32)(x)\n{END}"),
    "dropouts that draw nothing, before one that does": ("self.r = nn.LSTM(8, 8, 2, dropout=1.0)",
        "h = F.dropout(self.a(x), 0.2)\nF.dropout(h, 1.0)\nh = h + F.alpha_dropout(h, 1.0, self.training)\n"
        "h = h + self.r(h)[0] + F.dropout(x[:0], 0.5, self.training).sum()\n"
        f"h = F.dropout(h, 0.5, self.training)\n{END}"),
    "writes into views that are not slices": ("",
        "h = self.a(x) + 0\nh.T[1].add_(1)\nh.mT[2].mul_(3)\nu = h.view(4, 2, 4)\nu.mT[0, 1].mul_(5)\n"
        "u.swapaxes(0, 2)[1] += 2\nh.narrow(-1, 5, 2).copy_(x[:, :2])\nh.narrow(0, -2, 2).mul_(2)\nv = h[1]\n"
        f"h.transpose_(0, 1)\nh.swapdims_(0, 1).mul_(2)\nh = h + v\n{END}"),
    "a parametrisation": ("nn.utils.parametrizations.weight_norm(self.a)", f"h = self.a(x)\n{END}"),
}  # fmt: skip


@pytest.mark.parametrize("name", quick_at(KEPT, 4, 8, 12, 20, 24, 40, 44, 48))
def test_kept(name: str, tmp_path: Path) -> None:
    proved(spec_of(tmp_path, *KEPT[name]))


def proved(spec: str) -> None:
    """Captured, split by a random plan, and run against the original model."""
    graph = capture(spec, {})
    assert graph.loss is not None
    case = make_case(spec, {}, graph, steps=2)
    plan = random_plan(PlanningContext(graph, Mesh.parse("a=2"), load_hardware("cpu-local")), 3)
    program = lower(plan, graph)
    proof = check_files(case, program, emit(program, plan, graph))
    assert proof.passed, proof.failure


# name -> (constructor, forward, the line that is blamed, words of the message, words of the hint)
REFUSED = {
    "a Function that is no derivative": ("", f"h = Halved.apply(x, self.a.weight)\n{END}", "h = Halved",
        "the backward of Halved is not the gradient of its forward", "an own one must be elementwise and linear"),
    "a Function that clips": ("", f"h = Clipped.apply(self.a(x))\n{END}", "return g.clamp",
        "this Function's backward is not linear and elementwise", "a gradient that autograd makes"),
    "a checkpoint by hand": ("", "h = Again.apply(self.a(x), nn.Sequential(self.b, nn.Tanh()))\nreturn h.mean()",
        "h = Again", "the backward of Again runs autograd itself", "torch.utils.checkpoint"),
    "statistics in a checkpoint": ("self.n = nn.BatchNorm1d(8)",
        f"h = checkpoint(self.n, self.a(x), use_reentrant=False)\n{END}", "", "runs a write", "--recompute full"),
    "a count in a reentrant checkpoint": ("self.n, self.f = nn.Buffer(torch.ones(8)), lambda h: h * self.n.add_(1)",
        f"h = checkpoint(self.f, self.a(x), use_reentrant=True)\n{END}", "self.n, self.f", "runs a write", "full"),
    "a gradient set aside": ("", f"h = Aside.apply(self.a(x), [self.b.bias])\n{END}",
        "h = Aside", "the backward of Aside runs autograd itself", "torch.utils.checkpoint"),
    "a hook that clips": ("", f"h = self.a(x)\nh.register_hook(lambda g: g.clamp(-1, 1))\n{END}", "h.register_hook",
        "this gradient hook is not linear and elementwise", "in the training loop"),
    "a hook that reads": ("", f"h = self.a(x)\nh.register_hook(lambda g: g * g.max().item())\n{END}", "h.register_hook",
        "this gradient hook is not linear", "in the training loop"),
    "a hook after the use": ("", "h = self.a(x)\ny = self.b(h)\nh.register_hook(lambda g: -g)\nreturn y.mean()",
        "h.register_hook", "a hook is set on a tensor after its use", "register_hook at once"),
    "a parameter's hook": ("self.a.weight.register_hook(lambda g: g * 0)", f"h = self.a(x)\n{END}",
        "self.a.weight.register_hook", "the parameter a.weight has a gradient hook", "in the training loop"),
    "a module's hook": ("self.a.register_full_backward_hook(lambda m, i, o: None)", f"h = self.a(x)\n{END}",
        "self.a.register_full_backward_hook", "the module a has a backward hook", "in the training loop"),
    "saved otherwise": ("",
        f"with torch.autograd.graph.saved_tensors_hooks(torch.round, lambda t: t):\n    h = self.a(x).tanh()\n{END}",
        "with torch.autograd", "changes what autograd saves", "leave the hooks out"),
    "a gradient penalty": ("",
        "x = x.detach().requires_grad_()\ny = self.b(self.a(x).tanh()).sum()\n"
        "(g,) = torch.autograd.grad(y, x, create_graph=True)\nreturn g.norm(dim=1).mean() + y",
        "(g,) = torch.autograd.grad", "the forward differentiates (grad)", "are not supported"),
    "autocast": ("", f"with torch.autocast('cuda', dtype=torch.bfloat16):\n    h = self.a(x)\n{END}",
        "with torch.autocast", "turns autocast on for cuda", "--precision bf16-mixed"),
    "Python's random": ("", f"h = self.a(x) * numbers.random()\n{END}", "h = self.a(x) * numbers.random()",
        "draws from Python's or NumPy's random numbers", "torch.rand"),
    "NumPy's random": ("self.draw = np.random.default_rng(0)", f"h = self.a(x) * float(self.draw.random())\n{END}",
        "h = self.a(x) * float", "draws from Python's or NumPy's random numbers", "torch.rand"),
    "a layer dropped by chance": ("", f"h = self.a(x) if random.random() < 0.99 else self.a(-x)\n{END}",
        "h = self.a(x) if", "draws from Python's or NumPy's random numbers", "torch.rand"),
    "a seed": ("", f"torch.manual_seed(3)\nh = self.a(x) + torch.randn(8)\n{END}", "torch.manual_seed(3)",
        "the forward seeds torch", "a fixed noise belongs in a buffer"),
    "a step count": ("self.step = 0", f"self.step += 1\nh = self.a(x) / self.step\n{END}", "self.step += 1",
        "changes its attribute step from 0 to 1 and depends on it", "register_buffer"),
    "a gradient of the first call alone": ("self.ready = False",
        f"h = self.a(x).detach() if self.ready else self.a(x)\nself.ready = True\n{END}", "self.ready = True",
        "changes its attribute ready from False to True", "called once as the model is built"),
    "what the first call does": ("self.ready = False",
        f"h = self.a(x) * (1.0 if self.ready else 2.0)\nself.ready = True\n{END}", "self.ready = True",
        "changes its attribute ready from False to True", "called once as the model is built"),
    "a warm-up": ("self.step = 0",
        f"self.step += 1\nh = self.a(x) * (0.1 if self.step < 1000 else 1.0)\n{END}", "self.step += 1",
        "changes its attribute step from 0 to 1 and depends on it", "register_buffer"),
    "a list": ("self.seen = []", f"self.seen.append(0)\nh = self.a(x) / len(self.seen)\n{END}",
        "self.seen.append", "changes its attribute seen", "register_buffer"),
    "another parameter": ("", f"self.a.weight = nn.Parameter(self.a.weight * 2)\nh = self.a(x)\n{END}", "",
        "replaces the parameter a.weight", "under another name"),
    "a view of a parameter": ("self.w = self.a.weight.data", f"h = F.linear(x, self.w)\n{END}", "",
        "the attribute w is a view of the parameter a.weight", "the parameter itself"),
    "parameters in a list": ("self.ws = [self.a.weight]", f"h = F.linear(x, self.ws[0])\n{END}", "h = F.linear",
        "reaches the parameter a.weight other than", "nn.ParameterList"),
    "an assignment to .data": ("", f"h = self.a(x)\nh.data = h.data * 2\n{END}", "h.data = h.data * 2",
        "the forward assigns to .data", "x.detach()"),
    "a parameter changed": ("", f"self.a.weight.data.clamp_(-1, 1)\nh = self.a(x)\n{END}", "",
        "changes the parameter a.weight in place", "a buffer"),
    "a buffer that grows": ("self.register_buffer('t', torch.zeros(1, 8))",
        f"h = self.a(x)\nself.t = torch.cat([self.t, h.detach()[:1]])\nh = h + self.t.mean(0)\n{END}",
        "self.t = torch.cat(", "the buffer t another size", "register it with the size"),
    "another thread": ("",
        f"from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(1) as pool:\n"
        f"    h = pool.submit(self.a, x).result()\n{END}", "mine.py:", "made out of sight", "no other thread"),
    "stochastic depth": ("", f"h = self.a(x)\nif torch.rand(1).item() < 0.9:\n    h = h + h.tanh()\n{END}",
        "if torch.rand(1).item() < 0.9:", "the forward decides by a random number", "bernoulli_(keep) / keep"),
    "stochastic depth by a comparison": ("", f"h = self.a(x)\nif torch.rand(1) < 0.9:\n    h = h + h.tanh()\n{END}",
        "if torch.rand(1) < 0.9:", "the forward decides by a random number", "bernoulli_(keep) / keep"),
    "a branch on a value": ("", f"h = self.a(x) if x.sum() > 0 else self.a(-x)\n{END}", "h = self.a(x) if x.sum() > 0",
        "depends on a tensor's value", "follow from sizes"),
    "a mask with values": ("", f"m = torch.ones(4)\nv = m[:1]\nm[0] = x[0, 0]\nh = self.a(x if v.all() else -x)\n{END}",
        "v.all()", "depends on a tensor's value", "follow from sizes"),
    "a Fourier transform": ("", f"h = torch.fft.fft(self.a(x)).real\n{END}", "torch.fft.fft",
        "a complex tensor reaches aten.fft_fft", "2 * pi"),
    "a complex parameter": ("self.w = nn.Parameter(torch.ones(8, dtype=torch.cfloat))",
        f"h = (self.a(x) * self.w).real\n{END}", "", "complex64 tensors are not supported", "torch.view_as_real"),
    "strides of a part": ("", f"h = self.a(x)[1:].as_strided((3, 8), (4, 1))\n{END}", "as_strided((3, 8)",
        "as_strided of a part of a tensor", "x.contiguous()"),
    "a CTC loss": ("", "n = torch.full((2,), 4)\n"
        "y = self.b(self.a(x)).view(4, 1, 4).expand(4, 2, 4).log_softmax(-1)\n"
        "return F.ctc_loss(y, n.view(2, 1) - 2, n, n - 3)", "F.ctc_loss",
        "depends on its lengths' values", "--eval"),
    "packed sequences": ("self.r = nn.LSTM(6, 8, batch_first=True)",
        "p = nn.utils.rnn.pack_padded_sequence(x.view(2, 2, 6), torch.tensor([2, 1]), batch_first=True)\n"
        f"h = self.r(p)[0].data\n{END}", "pack_padded_sequence",
        "packed sequences hold depends", "the padded batch"),
    "an embedding with a largest norm": ("self.e = nn.Embedding(9, 8, max_norm=1.0)",
        f"h = self.a(x) * self.e((x[:, 0] > 0).long())\n{END}", "",
        "changes the parameter e.weight in place", "no max_norm"),
    "a flag that the first call sets": ("self.register_buffer('on', torch.tensor(False))",
        f"h = self.a(x)\nif not self.on:\n    self.on.fill_(True)\n    h = h * 0\n{END}", "if not self.on",
        "decides by the buffer on", "call the model once"),
    "a flag that comes with weights": ("self.register_buffer('on', torch.tensor(1.0))",
        f"h = self.a(x)\nif self.on > 0:\n    h = h * 0\n{END}", "if self.on", "depends on a tensor's value",
        "from sizes"),
    "counts of classes": ("", f"n = torch.bincount(self.a(x).argmax(1), minlength=8)\nh = self.a(x) * n\n{END}",
        "torch.bincount", "shape of a result depends", "one_hot"),
    "a scripted module": ("self.s = torch.jit.script(nn.Linear(8, 8))", f"h = self.s(self.a(x))\n{END}", "",
        "the module s is scripted", "made from"),
    "two losses": ("", "h = self.a(x)\nreturn self.b(h).mean(), h.abs().mean()", "mine.py:",
        "returns 2 losses, of which none is called loss: [0] at", "their sum as `loss`"),
    "a dict of losses": ("", "h = self.a(x)\nreturn {'cls': self.b(h).mean(), 'box': h.abs().mean()}", "['box']",
        "returns 2 losses, of which none is called loss: ['cls'] at", "their sum as `loss`"),
    "a loss a sample": ("", "return {'loss': self.b(self.a(x)).square().mean(-1)}", "",
        "the loss is float32 of shape (4,), not a single number", "its mean"),
    "a loss of nothing": ("self.requires_grad_(False)", "return {'loss': self.b(self.a(x)).mean()}", "mine.py:",
        "no trainable parameter contributes to the loss", "requires_grad"),
}  # fmt: skip


# name -> (constructor, forward, what is said to be assumed)
GUARDED = {
    "an assertion": ("", f"assert (x < 100).all()\nh = self.a(x)\n{END}", "`(x < 100).all()` is True"),
    "an assertion that compares": ("", f"assert x.abs().max() < 100\nh = self.a(x)\n{END}",
        "`x.abs().max() < 100` is True"),
    "an assertion of the contrary": ("", f"assert not x.isnan().any(), 'NaN'\nh = self.a(x)\n{END}",
        "`x.isnan().any()` is False"),
    "a branch that raises": ("",
        f"if (x > 100).any() or not (x > -100).all():\n    raise ValueError\nh = self.a(x)\n{END}",
        "`(x > -100).all()` is True"),
    "an item": ("", f"if (x.abs().max() > 100).item():\n    raise ValueError\nh = self.a(x)\n{END}", "is False"),
    "a branch after infinities": ("",
        f"h = self.a(x)\nif torch.isinf(h).any() or torch.isnan(h).any():\n    h = h.clamp(-9, 9)\n{END}",
        "`torch.isnan(h).any()` is False"),
    "a flag in a buffer": ("self.register_buffer('on', torch.tensor([True]))",
        f"h = self.a(x)\nif not self.on:\n    h = h * 0\n{END}", "the buffer on stays True, which "),
    "a count in a buffer": ("self.register_buffer('n', torch.tensor(3))",
        f"h = self.a(x) * (self.n + 1).item()\n{END}", "the buffer n stays 3, which "),
    "torch._assert": ("", f"torch._assert(x.abs().max() < 100, 'large')\nh = self.a(x)\n{END}", "holds"),
}  # fmt: skip
ENCODER = "self.t = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1)"
DECIDED = {
    "a mask of ones": ("", f"m = torch.ones(len(x))\nif m.all() and not (m == 0).any().item():\n    x = x * 2\n"
        f"h = self.a(x) * int(m.sum())\n{END}"),
    "a written mask": ("", f"m = torch.ones(4)\nv = m[:1]\nm[0] = 0\nh = self.a(x if v.all() else -x)\n{END}"),
    "a causal mask": (ENCODER,
        f"h = self.a(x).unsqueeze(0)\nh = self.t(h, nn.Transformer.generate_square_subsequent_mask(4))\n{END}"),
    "a mask from values": (ENCODER,
        f"h = self.a(x).unsqueeze(0)\nh = self.t(h, x[:, :4].exp())\n{END}"),
}  # fmt: skip


@pytest.mark.parametrize("name", quick_at(GUARDED, 4, 8))
def test_a_guard_gets_its_usual_answer_and_it_is_said(name: str, tmp_path: Path) -> None:
    init, forward, assumed = GUARDED[name]
    proved(spec := spec_of(tmp_path, init, forward))
    notes = capture(spec, {}).assumed
    assert notes and assumed in notes[-1] and all("mine.py:" in each for each in notes), notes


# name -> (constructor, forward): what is kept from call to call, and would be computed anew
CACHES = {
    "a table by its length": ("self.size = self.table = None",
        "if len(x) != self.size:\n    self.size = len(x)\n    self.table = torch.arange(len(x)).float().cos()\n"
        f"h = self.a(x) * self.table[:, None]\n{END}"),
    "masks by their size": ("self.masks = {}",
        "if 4 not in self.masks:\n    self.masks[4] = torch.tril(torch.ones(4, 8))\n"
        f"h = self.a(x).masked_fill(self.masks[4] == 0, 0.5)\n{END}"),
    "a part of a buffer, used at once": (
        "self.length = 0\nself.register_buffer('t', torch.zeros(8), persistent=False)\n"
        "self.f = nn.Parameter(torch.ones(1), requires_grad=False)",
        "if self.length >= 4:\n    t = self.t[:4].detach()\nelse:\n    t = torch.arange(4.0) * self.f\n"
        f"    self.t[:4] = t.detach()\n    self.length = 4\nh = self.a(x) + t[:, None]\n{END}"),
    "a buffer that is filled at another size": ("self.register_buffer('t', torch.zeros(1), persistent=False)",
        f"if len(self.t) != 4:\n    self.t = torch.arange(4.0).cos()\nh = self.a(x) * self.t[:, None]\n{END}"),
    "a buffer that the forward makes": ("self.register_buffer('bias', None, persistent=False)",
        "if self.bias is None:\n    self.register_buffer('bias', torch.arange(4.0)[:, None], persistent=False)\n"
        f"h = self.a(x) + self.bias\n{END}"),
}  # fmt: skip


@pytest.mark.parametrize("name", quick_at(CACHES, 2))
def test_a_cache_is_computed_in_each_call(name: str, tmp_path: Path) -> None:
    proved(spec := spec_of(tmp_path, *CACHES[name]))
    assert capture(spec, {}).assumed == ()


# what is kept -> what the first call keeps
@pytest.mark.parametrize("name", quick_at(DECIDED, 0))
def test_what_sizes_decide_is_known(name: str, tmp_path: Path) -> None:
    proved(spec := spec_of(tmp_path, *DECIDED[name]))
    assert capture(spec, {}).assumed == ()


def test_a_guard_that_was_not_passed_fails_the_verification(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "", f"h = self.a(x)\nif not torch.isfinite(h * 1e305 * 1e5).all():\n    h = -2 * h\n{END}")
    graph = capture(spec, {})
    case = make_case(spec, {}, graph, steps=1)
    plan = random_plan(PlanningContext(graph, Mesh.parse("a=2"), load_hardware("cpu-local")), 3)
    program = lower(plan, graph)
    assert not check_files(case, program, emit(program, plan, graph)).passed


@pytest.mark.parametrize("name", thinned(REFUSED, 4))
def test_refused(name: str, tmp_path: Path) -> None:
    init, forward, line, words, hint = REFUSED[name]
    with pytest.raises(CaptureError) as caught:
        capture(spec_of(tmp_path, init, forward), {})
    assert caught.value.exit_code == 4
    assert words in caught.value.message and line in caught.value.message, caught.value.message
    assert hint in caught.value.hint, caught.value.hint
    assert "mine.py" in caught.value.message or not line


def test_a_forward_in_inference_mode_has_nothing_to_train(tmp_path: Path) -> None:
    graph = capture(spec_of(tmp_path, "", f"with torch.inference_mode():\n    h = self.a(x)\n    {END}"), {})
    assert graph.loss is None


def test_a_region_without_autocast_is_not_lowered(tmp_path: Path) -> None:
    region = "with torch.autocast('cpu', enabled=False):\n    h = {}\n" + END
    product = spec_of(tmp_path, "", region.format("self.a(x)"))
    with pytest.raises(CaptureError, match=r"turns autocast off.*mine.py:\d+ `h = self.a\(x\)`"):
        capture(product, {}, precision="bf16-mixed")
    assert capture(product, {}).loss
    assert capture(spec_of(tmp_path, "", region.format("self.a.weight.t()[:4].cos()")), {}, precision="bf16-mixed").loss


def test_autocast_to_float32_turns_it_off(tmp_path: Path) -> None:
    region = "with torch.autocast('cpu', dtype=torch.float32):\n    h = {}\n" + END
    assert capture(spec_of(tmp_path, "", region.format("self.a(x)")), {}).loss
    with pytest.raises(CaptureError, match="turns autocast off"):
        capture(spec_of(tmp_path, "", region.format("self.a(x)")), {}, precision="bf16-mixed")


def test_what_was_watched_is_as_before(tmp_path: Path) -> None:
    import torch

    watched = (torch.Tensor.register_hook, torch.autograd.grad, torch.manual_seed, torch.autocast.__enter__,
               torch.autograd.Function.__dict__["apply"], torch.autocast.__init__)  # fmt: skip
    capture(spec_of(tmp_path, "", f"torch.set_default_dtype(torch.float64)\nh = self.a(x)\n{END}"), {})
    with pytest.raises(CaptureError):
        capture(spec_of(tmp_path, "", f"torch.set_grad_enabled(False)\ntorch.manual_seed(3)\nh = self.a(x)\n{END}"), {})
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    assert watched == (torch.Tensor.register_hook, torch.autograd.grad, torch.manual_seed, torch.autocast.__enter__,
                       torch.autograd.Function.__dict__["apply"], torch.autocast.__init__)  # fmt: skip


class Parts(nn.Module):
    """A total and its parts, as variational autoencoders return them; `extra` is a part of nothing."""

    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(4, 4), extra

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        reconstruction, kl = (self.linear(x) - x).square().mean(), self.linear.weight.square().sum()
        total = reconstruction + 0.1 * (kl.detach() if self.extra else kl)
        return kl, total, reconstruction


def test_the_loss_is_what_the_other_scalars_are_parts_of() -> None:
    graph = capture_model(Parts(False), (torch.randn(3, 4),))
    assert graph.loss == graph.outputs[1]
    assert len(graph.assumed) == 1 and graph.assumed[0].endswith("is the loss, and no other output")
    with pytest.raises(CaptureError, match="3 losses"):
        capture_model(Parts(True), (torch.randn(3, 4),))


def test_a_model_that_puts_itself_on_meta_is_verified_with_values_of_its_own(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "self.scale = torch.ones(8)", f"h = self.a(x) * self.scale\n{END}")
    path = Path(spec.rpartition(":")[0])
    text = path.read_text().replace("    return Model()", "    with torch.device('meta'):\n        return Model()")
    path.write_text(text)
    proved(spec)


def test_what_a_forward_leaves_out_while_it_is_compiled_is_there_as_it_is_called() -> None:
    """transformers makes no mask of ones where torch says that it is compiling, and then takes it for one."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = None
            if not torch.compiler.is_compiling():
                mask = torch.ones(x.shape[0])
            return (self.a(x) * (1 + mask[:, None])).mean()  # type: ignore[index]

    original = torch.compiler.is_compiling
    graph = capture_model(Asks(), (torch.randn(3, 4),))
    assert torch.compiler.is_compiling is original
    assert any(op.target == "aten.full" for op in graph.ops)


def test_what_a_forward_does_only_while_it_is_exported_is_not_there_as_it_is_called() -> None:
    """transformers makes masks of ones where torch says that it is exporting, which Informer's shapes do not fit."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(7) if torch.compiler.is_exporting() else None
            y = self.a(x)
            return y.mean() if mask is None else (y * mask[:, None]).mean()

    graph = capture_model(Asks(), (torch.randn(3, 4),))
    assert not any(op.target in ("aten.full", "aten.mul") for op in graph.ops)
