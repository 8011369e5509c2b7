"""Runs a script under torch's profiler and writes the trace of rank 0: for `autoshard compare`.

torchrun --nproc-per-node 2 profiled.py trace.json out/mlp/train.py --backend gloo --steps 4
"""

import os
import runpy
import sys

import torch
from torch.profiler import ProfilerActivity, profile


def main() -> None:
    trace, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]) as profiler:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:  # as a script that says how it went
            if ended.code:
                raise
    if os.environ.get("RANK", "0") == "0":
        profiler.export_chrome_trace(trace)


if __name__ == "__main__":
    main()
