"""A timer for tests that depend on no machine."""


class Looks:
    """Knows no time: every look at it takes one second. A limit of k is k looks."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> float:
        self.number += 1
        return float(self.number)
