"""One function of an eager program runs split over the devices: the example of functional operator sharding.

torchrun --nproc-per-node 4 examples/shard_function.py
"""

import torch
from torch import Tensor, nn

import autoshard


def dense_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(x @ weight + bias)


class Net(nn.Module):
    """Eager but for its block, which is kept as an attribute as any module is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.block = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.block(self.first(x))))


def main() -> None:
    torch.manual_seed(0)  # every rank has the same batch
    x, weight, bias = torch.randn(8, 16), torch.randn(16, 32), torch.randn(32)
    sharded = autoshard.shard(dense_relu, in_strategy=((2, 2), None, None), device="CPU")
    error = (sharded(x, weight, bias) - dense_relu(x, weight, bias)).abs().max()
    say(f"dense_relu: largest difference {float(error):.1e}")

    net, labels = Net(), torch.randint(0, 10, (8,))
    net.block = autoshard.shard(net.block, in_strategy=((2, 1),), parameter_plan={"2.weight": (1, 4)}, device="CPU")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        loss = nn.functional.cross_entropy(net(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(f"step {step}: loss {float(loss):.6f}")


def say(text: str) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
