"""A stand-in for torch_npu on a machine without Ascend: the device type `npu` is there, its tensors lie on the CPU.

`hccl` is registered as a backend of torch.distributed that moves by gloo. What names an npu device is given the CPU, so
that a program written for `npu` runs as it stands, and every name that it uses of torch_npu's device module must exist.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CALLED: list[str] = []  # names of the device module that were called
_CPU = torch.device("cpu")


def _is_npu(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "npu") or (isinstance(value, str) and value[:3] == "npu")


class _OnCpu(TorchFunctionMode):
    """Every call of torch that names an npu device runs on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        cpu_kwargs = {name: _CPU if _is_npu(value) else value for name, value in (kwargs or {}).items()}
        return func(*(_CPU if _is_npu(value) else value for value in args), **cpu_kwargs)


def _noted(name: str, answer: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLED.append(name)
        return answer

    return call


class _Options:
    """Of a process group, as torch_npu's."""

    hccl_config: ClassVar[dict[str, int]] = {}


def _gloo(dist_opts: Any, options: _Options | None) -> Any:
    if options is not None:
        print(f"hccl: a group of {dist_opts.group_size} with {options.hccl_config}", flush=True)
    return dist.ProcessGroupGloo(dist_opts.store, dist_opts.group_rank, dist_opts.group_size, dist_opts.timeout)


_C = types.SimpleNamespace(
    _distributed_c10d=types.SimpleNamespace(ProcessGroupHCCL=types.SimpleNamespace(Options=_Options))
)


torch.utils.rename_privateuse1_backend("npu")
_module = types.ModuleType("torch.npu")
for _name, _answer in {
    "is_available": True,
    "device_count": 8,
    "current_device": 0,
    "set_device": None,
    "synchronize": None,
    "is_initialized": True,
    "_is_in_bad_fork": False,
    "manual_seed_all": None,
    "manual_seed": None,
    "get_rng_state": None,
    "set_rng_state": None,
    "current_stream": types.SimpleNamespace(synchronize=lambda: None),
    "stream": contextlib.nullcontext(),
}.items():
    setattr(_module, _name, _noted(_name, _answer))
_module.default_generators = [torch.default_generator] * 8  # type: ignore[attr-defined]
_module.matmul = types.SimpleNamespace(allow_hf32=False)  # type: ignore[attr-defined]
torch._register_device_module("npu", _module)
torch._C._get_accelerator = lambda *_: _CPU  # the hooks behind it are C++'s
torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign,assignment]
dist.Backend.register_backend("hccl", _gloo, extended_api=True, devices=["npu", "cpu"])
_OnCpu().__enter__()
