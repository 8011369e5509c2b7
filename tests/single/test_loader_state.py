"""What a checkpoint holds of a loader that has a state of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.single.test_train_alone import Start, folder, package, start, steps

__all__ = ["folder", "package", "start"]  # fixtures

LIVE = """
import fractions
import torch
class Loader:
    state = {state}
    def __iter__(self):
        while True:
            self.state[0] += 1
            yield torch.full((4, 6), 1), torch.full((4, 6), 2)
    def state_dict(self):
        return self.state
    def load_state_dict(self, state):
        self.state = state
make = Loader
"""


def test_the_state_of_a_loader_is_that_of_its_batch(start: Start, tmp_path: Path) -> None:
    """Whatever the loader does to it later; what could not be read back is said before it is written."""
    options = ("--steps", 5, "--prefetch", 4, "--save-every", 2, "--save")
    for state, saved in (("[0]", "saved"), ("[fractions.Fraction(1)]", "other")):
        (tmp_path / "live.py").write_text(LIVE.format(state=state))
        code, _, errors = start(*options, tmp_path / saved, "--data", f"{tmp_path / 'live.py'}:make")
        assert code == (0 if state == "[0]" else 2), errors
    assert torch.load(tmp_path / "saved/step-2/loader-0.pt") == {"ranks": 1, "state": [2]}
    assert "could not be read back" in errors and "fractions.Fraction" in errors


ENDING = """
import torch
class Loader:
    done = 0
    def __iter__(self):
        while self.done < 2:
            self.done += 1
            yield torch.full((4, 6), self.done), torch.full((4, 6), 2)
        self.done = 0
    def state_dict(self):
        return {"done": self.done}
    def load_state_dict(self, state):
        self.done = state["done"]
make = Loader
"""


def test_a_state_from_the_last_batch_of_a_loader_goes_on_with_its_first(start: Start, tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text(ENDING)
    data = ("--data", f"{tmp_path / 'ending.py'}:make", "--lr", 0)
    code, whole, stderr = start("--steps", 3, *data, "--save", tmp_path / "saved", "--save-every", 2)
    assert code == 0, stderr
    assert torch.load(tmp_path / "saved/step-2/loader-0.pt")["state"] == {"done": 2}
    code, tail, stderr = start("--steps", 3, *data, "--resume", tmp_path / "saved/step-2")
    assert code == 0 and steps(tail) == {3: steps(whole)[3]}, stderr
