"""A process that has imported torch and starts Python programs as forks of it: `python fork_server.py [MODULE ...]`.

One request a line on its input, as JSON: argv, env, cwd, out, err, group, status, largest_file. The program's process
id and then its exit code are lines of the file `status`. The modules named are imported before.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import runpy
import signal
import sys
import threading
import types
from typing import Any

FIRST = (
    "torch", "torch.distributed.tensor", "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint._fsspec_filesystem", "torch.utils.data", "torch._dynamo", "torch.optim.adamw",
)  # fmt: skip
OURS = (__file__, runpy.__file__, "<frozen runpy>")


def main() -> None:
    for name in (*FIRST, *sys.argv[1:]):
        importlib.import_module(name)
    assert threading.active_count() == 1, "a process with threads can't be forked"
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch
    for line in sys.stdin:
        request = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _watch(request)
            return


def _watch(request: dict[str, Any]) -> None:
    """Returns in the program, once it has ended without an error; the process that watches it ends here."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # its id is written
        os.close(read)
        _become(request)
        return
    with open(request["status"], "w", encoding="ascii", buffering=1) as status:
        status.write(f"{child}\n")
        os.write(write, b"1")
        _, code = os.waitpid(child, 0)
        status.write(f"{os.waitstatus_to_exitcode(code)}\n")
    os._exit(0)


def _become(request: dict[str, Any]) -> None:
    if request["group"] is not None:
        os.setpgid(0, request["group"])
    for number, path in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if request["largest_file"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["largest_file"],) * 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.chdir(request["cwd"])
    known = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    os.environ.clear()
    os.environ.update(request["env"])
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = ["", *paths, *(entry for entry in sys.path[1:] if entry not in known)]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = list(request["argv"])
    try:
        if sys.argv[0] == "-P":  # without the folder that it runs in
            del sys.argv[0], sys.path[0]
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif sys.argv[0] == "-c":
            exec(compile(sys.argv.pop(1), "<string>", "exec"), sys.modules["__main__"].__dict__)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit:
        raise  # the interpreter ends with its code
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in OURS:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


if __name__ == "__main__":
    main()
