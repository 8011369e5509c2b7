# mypy: ignore-errors
"""The options of train_servers.py."""

from __future__ import annotations

import argparse
import os

from batches import UserError
from run_options import AUTO, LEARNING_RATE, check_file, check_writable
from runtime import SHAPES
from server_plan import DEVICE, MOST_WORKERS, WORKERS

SNAPSHOT_EVERY = 100  # steps, unless an option says: one of 205 MB takes 3.2 steps of examples/dlrm.py, 3 % of them


def parse_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--address", metavar="auto|HOST:PORT", help="a Ray cluster that runs; else one on this machine")
    workers = f"as planned: {WORKERS}" + (f":{MOST_WORKERS}" if MOST_WORKERS > WORKERS else "")
    parser.add_argument("--workers", metavar="W|MIN:MAX", help=f"{workers}. Those beyond MIN join when there is room")
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), default=DEVICE, help="of workers")
    parser.add_argument("--steps", type=int, default=10, help="in all, those before --resume included")
    parser.add_argument("--seed", type=int, default=0, help="of initialisation, synthetic batches and dropout")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE, help="(highest) learning rate")
    parser.add_argument("--table-lr", type=float, default=0.01, help="of row-wise Adagrad, for tables")
    parser.add_argument("--schedule", choices=sorted(SHAPES), default="constant", help="of the rates, down to --steps")
    parser.add_argument("--warmup", type=int, default=0, metavar="N", help="steps in which the rates rise first")
    parser.add_argument("--lr-least", type=float, default=0.0, metavar="SHARE", help="of the rates, left at the end")
    parser.add_argument(
        "--weight-decay", type=float, metavar="X", help="of matrices; without it as torch has it, of all"
    )
    parser.add_argument("--max-norm", type=float, default=1.0, help="clip gradients to this global norm; inf: don't")
    parser.add_argument("--data", metavar="FILE:FUNCTION", help="a function that yields batches")
    parser.add_argument("--prefetch", type=int, default=2, metavar="N", help="batches that are read ahead; 0: none")
    parser.add_argument("--eval-data", metavar="FILE:FUNCTION", help="a function that yields batches to evaluate on")
    parser.add_argument("--eval-every", type=int, default=0, metavar="N", help="steps; 0: only at the end")
    parser.add_argument("--eval-batches", type=int, default=10, metavar="N", help="at most, of --eval-data")
    parser.add_argument("--weights", metavar="FILE", help="start from the original model's weights")
    parser.add_argument("--save", metavar="DIR", help="write checkpoints to DIR/step-N; all nodes must see it")
    parser.add_argument("--save-every", type=int, default=0, metavar="N", help="steps; 0: only at the end")
    parser.add_argument("--keep", type=int, metavar="N", help="the last N checkpoints; without it all")
    every = f"steps after which servers can go back; without it --save-every, or {SNAPSHOT_EVERY}"
    parser.add_argument("--snapshot-every", type=int, metavar="N", help=every)
    parser.add_argument(
        "--resume", metavar="DIR|auto", help="continue from the last checkpoint in DIR; auto: of --save"
    )
    patience = "in which Ray may bring back a server that was lost; default %(default)g"
    parser.add_argument("--patience", type=float, default=300.0, metavar="SECONDS", help=patience)
    parser.add_argument("--to-original", nargs=2, metavar=("DIR", "FILE"), help="a checkpoint to weights, and stop")
    parser.add_argument("--log-every", type=int, default=1, metavar="N", help="print every N steps")
    parser.add_argument("--log-json", metavar="FILE", help="also add the steps to FILE, one JSON object a line")
    return parser.parse_args()


def take_options(options: argparse.Namespace) -> None:
    """UserError on a setting that makes no sense."""
    words = (options.workers or f"{WORKERS}:{MOST_WORKERS}").split(":")
    numbers = [int(word) for word in words if word.isdecimal()]
    if len(numbers) != len(words) or len(words) > 2 or not 1 <= numbers[0] <= numbers[-1]:
        raise UserError(
            f"--workers {options.workers}: expected a number of 1 or more, or MIN:MAX\n  try: --workers 2:4"
        )
    options.least, options.most = numbers[0], numbers[-1]
    least = dict.fromkeys(("steps", "warmup", "prefetch", "save_every", "eval_every", "patience"), 0)
    least |= dict.fromkeys(("log_every", "snapshot_every", "keep", "eval_batches"), 1)
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected {bound} or more")
    if not (options.lr >= 0 and options.table_lr >= 0 and 0 <= options.lr_least <= 1 and options.max_norm > 0):
        raise UserError("--lr, --table-lr: expected 0 or more; --lr-least: from 0 to 1; --max-norm: more than 0")
    if (options.save_every or options.keep or options.resume == AUTO) and not options.save:
        raise UserError("--save-every, --keep and --resume auto need a folder\n  try: --save checkpoints")
    if options.eval_every and not options.eval_data:
        raise UserError("--eval-every needs batches to evaluate on\n  try: --eval-data data.py:make_held_out")
    if options.save:
        check_writable(f"--save {options.save}", options.save)
        options.save = os.path.abspath(options.save)
    if options.log_json:
        check_file(f"--log-json {options.log_json}", options.log_json)
