"""Tensor parallelism by hand, for `overlap.py`: Megatron-LM's column- and row-parallel linears in the models of Hugging
Face transformers, with a table and a loss that are cut along the vocabulary.

Its collectives are Megatron's without sequence parallelism: each block sums what its row-parallel linears made, and the
gradients of what its column-parallel ones read together; the loss takes a maximum and two sums.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

PACKED = {"c_attn": 3}  # queries, keys and values side by side


class _Copy(torch.autograd.Function):
    """Megatron's copy to the tensor-parallel region: the gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        whole = grads[0].contiguous()
        dist.all_reduce(whole)
        return whole


class _Reduce(torch.autograd.Function):
    """Megatron's reduce from the tensor-parallel region: the value is summed, in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _CrossEntropy(torch.autograd.Function):
    """Megatron's vocabulary-parallel cross entropy: (rows, classes of this rank) -> (rows,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        largest = logits.max(-1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        logits = logits - largest.unsqueeze(-1)
        first = dist.get_rank() * logits.shape[-1]
        elsewhere = (labels < first) | (labels >= first + logits.shape[-1])
        column = (labels - first).masked_fill(elsewhere, 0)
        chosen = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
        dist.all_reduce(chosen)
        softmax = logits.exp_()
        total = softmax.sum(-1)
        dist.all_reduce(total)
        softmax /= total.unsqueeze(-1)
        ctx.save_for_backward(softmax, column, elsewhere)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        softmax, column, elsewhere = ctx.saved_tensors
        softmax.scatter_add_(-1, column.unsqueeze(-1), elsewhere.to(softmax.dtype).sub_(1).unsqueeze(-1))
        return softmax.mul_(grads[0].unsqueeze(-1)), None


class ColumnParallel(nn.Module):
    """What it reads was made ready by `_Copy`, once for all that read it."""

    def __init__(self, linear: nn.Module, transposed: bool, blocks: int) -> None:
        super().__init__()
        whole = cast(Tensor, linear.weight.t() if transposed else linear.weight)
        self.weight, bias = _part(whole, 0, blocks), cast(Tensor | None, linear.bias)
        self.bias = None if bias is None else _part(bias, 0, blocks)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowParallel(nn.Module):
    def __init__(self, linear: nn.Module, transposed: bool) -> None:
        super().__init__()
        self.weight = _part(cast(Tensor, linear.weight.t() if transposed else linear.weight), 1)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        whole = cast(Tensor, _Reduce.apply(F.linear(x, self.weight)))
        return whole if self.bias is None else whole + cast(Tensor, self.bias)


class VocabularyParallel(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, words: Tensor) -> Tensor:
        first = dist.get_rank() * len(self.weight)
        elsewhere = (words < first) | (words >= first + len(self.weight))
        rows = F.embedding((words - first).masked_fill(elsewhere, 0), self.weight)
        return cast(Tensor, _Reduce.apply(rows.masked_fill_(elsewhere.unsqueeze(-1), 0)))


class TensorParallel(nn.Module):
    """A GPT-2 or a Llama with its loss; of each weight what this rank holds."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.base_model
        table = self.model.get_input_embeddings().weight
        self.head = _part(table, 0)
        tied = model.lm_head.weight is table
        self.model.set_input_embeddings(VocabularyParallel(self.head if tied else _part(table, 0)))
        if not tied:
            self.head = _part(model.lm_head.weight, 0)
        for module in list(self.model.modules()):
            _cut(module)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        hidden = self.model(input_ids=words, use_cache=False).last_hidden_state
        logits = F.linear(cast(Tensor, _Copy.apply(hidden)), self.head)
        rows, following = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return cast(Tensor, _CrossEntropy.apply(rows, following)).mean()


COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_attn", "c_fc")
ROWS = ("o_proj", "down_proj", "c_proj")


def _cut(module: Any) -> None:
    """The linears of an attention or of the two layers after it."""
    children = dict(module.named_children())
    columns = [name for name in COLUMNS if name in children]
    for name in (*columns, *(name for name in ROWS if name in children)):
        linear = children[name]
        transposed = type(linear).__name__ == "Conv1D"
        cut = (
            ColumnParallel(linear, transposed, PACKED.get(name, 1))
            if name in columns
            else RowParallel(linear, transposed)
        )
        setattr(module, name, cut)
    if hasattr(module, "split_size"):  # how GPT-2 takes queries, keys and values apart
        module.split_size //= dist.get_world_size()
    if columns:
        module.register_forward_pre_hook(_copied, with_kwargs=True)


def _copied(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (_Copy.apply(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": _Copy.apply(kwargs["hidden_states"])}


def _part(weight: Tensor, dim: int, blocks: int = 1) -> nn.Parameter:
    """Of each block of a dim what this rank holds."""
    parts = [block.chunk(dist.get_world_size(), dim)[dist.get_rank()] for block in weight.detach().chunk(blocks, dim)]
    parameter: Any = nn.Parameter(torch.cat(parts, dim).contiguous())
    parameter.is_cut = True
    return cast(nn.Parameter, parameter)


def clip(groups: list[list[Tensor]]) -> None:
    """To a norm of 1, of the parts of all ranks: matrices are cut, vectors of norms and rows' biases are whole."""
    cut = [p for group in groups for p in group if hasattr(p, "is_cut")]
    whole = [p for group in groups for p in group if not hasattr(p, "is_cut")]
    squares = torch.nn.utils.get_total_norm([p.grad for p in cut if p.grad is not None]).square()
    dist.all_reduce(squares)
    total = (squares + torch.nn.utils.get_total_norm([p.grad for p in whole if p.grad is not None]).square()).sqrt()
    torch.nn.utils.clip_grads_with_norm_([*cut, *whole], 1.0, total)
