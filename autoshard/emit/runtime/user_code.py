"""Import of the module that registers the model's own operators."""

import importlib

import torch


def register_operators(module: str, *operators: str) -> None:
    """Imports `module`, which registers these operators (`namespace.name`), unless they exist already.

    ImportError says which operators are missing and what to do. `module` is "" if it was not known.
    """
    missing = [name for name in operators if not _is_registered(name)]
    if not missing:
        return
    if not module:
        raise ImportError(
            f"nothing registers {', '.join(missing)}: import what does at the top of model_parallel.py, with its "
            "folder on PYTHONPATH"
        )
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} registers {', '.join(missing)} and can't be imported ({error}): put the folder that holds "
            f"{error.name or module} on PYTHONPATH"
        ) from error
    missing = [name for name in operators if not _is_registered(name)]
    if missing:
        raise ImportError(f"{module} was imported, but does not register {', '.join(missing)} when it is")


def _is_registered(operator: str) -> bool:
    namespace, _, name = operator.partition(".")
    return hasattr(getattr(torch.ops, namespace), name)
