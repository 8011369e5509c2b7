"""Strategies on operators in the model's own code: the example of operator-level parallelism, on 8 devices.

The first product is cut by rows and inner dim, which leaves partial sums; the relu is data parallel. Nothing is said of
the second product and the loss: they are searched. Alone, the model computes what it computes without strategies.

python examples/operator_strategies.py                                # plans, proves and trains in one process
torchrun --nproc-per-node 8 examples/operator_strategies.py           # trains over 8 processes
autoshard plan examples/operator_strategies.py:build --mesh a=2,b=4 --hardware cpu-local --verify
"""

import torch
from torch import Tensor, nn

import autoshard

MESH = "a=2,b=4"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 16) / 32**0.5)
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = autoshard.operator(torch.matmul, in_strategy=((2, 4), (4, 1)))(x, self.weight)
        with autoshard.strategy(in_strategy=((8, 1),)):
            y = torch.relu(y)
        return nn.functional.mse_loss(self.head(y), target)


def build() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)  # every rank has the same model and batch
    return Net(), (torch.randn(64, 32), torch.randn(64, 8))


def main() -> None:
    model, batch = build()
    split = torch.distributed.is_torchelastic_launched()
    plan = autoshard.plan(model, batch, hardware="cpu-local", mesh=MESH)
    if split:
        model = autoshard.parallelize(model, plan)
    else:
        print(autoshard.strategies_text(plan), end="")
        print(autoshard.verify(plan).summary())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not split or torch.distributed.get_rank() == 0:
            print(f"step {step}: loss {loss.detach():.6f}", flush=True)


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
