"""Another batch in every step: MindSpore's example of parallel dynamic shape, on 8 devices.

The batch is any multiple of 8. The products and relus have strategies in the model's own code, the last product and
the loss are searched. One plan holds for all batches; nothing is planned, and no process started, again.

python examples/dynamic_shapes.py                                # plans, and proves it for several batches
torchrun --nproc-per-node 8 examples/dynamic_shapes.py           # trains over 8 processes, each step another batch
autoshard plan examples/dynamic_shapes.py:build --mesh a=2,b=4 --hardware cpu-local --verify --backend lockstep
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import autoshard

MESH = "a=2,b=4"
STEPS = 5
Cuts = tuple[tuple[int, ...], ...]


def cut(function: Callable[..., Tensor], strategy: Cuts, *operands: Tensor) -> Tensor:
    return autoshard.operator(function, in_strategy=strategy)(*operands)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(28 * 28, 512) / 28)
        self.second = nn.Parameter(torch.randn(512, 512) / 512**0.5)
        self.third = nn.Parameter(torch.randn(512, 10) / 512**0.5)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x = x.reshape(-1, 28 * 28)
        x = cut(torch.relu, ((4, 1),), cut(torch.matmul, ((2, 4), (4, 1)), x, self.first))
        x = cut(torch.relu, ((8, 1),), cut(torch.matmul, ((1, 8), (8, 1)), x, self.second))
        return nn.functional.cross_entropy(x @ self.third, label)


def build() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)  # every rank has the same model
    batch = autoshard.Symbol(divisor=8)
    return autoshard.set_inputs(Net(), (batch, 1, 28, 28), (batch,)), batch_of(16)


def batch_of(samples: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(samples)  # the same on every rank
    return torch.randn(samples, 1, 28, 28, generator=source), torch.randint(0, 10, (samples,), generator=source)


def main() -> None:
    model, example = build()
    plan = autoshard.plan(model, example, hardware="cpu-local", mesh=MESH)
    if not torch.distributed.is_torchelastic_launched():
        print(plan)
        print(autoshard.verify(plan).summary())
        return
    alone = Net()
    alone.load_state_dict(model.state_dict())
    split = autoshard.parallelize(model, plan)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (split, alone)]
    for step in range(STEPS):
        batch = batch_of(8 * (1 + 3 * step % 7))
        losses = []
        for network, optimizer in zip((split, alone), optimizers, strict=True):
            optimizer.zero_grad()
            loss = network(*batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        if torch.distributed.get_rank() == 0:
            message = f"step {step}: batch {len(batch[0])}, loss {losses[0]:.6f}, of one process {losses[1]:.6f}"
            print(message, flush=True)


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
