"""Number of devices that may share a sequence (context parallelism) by default: each keeps enough tokens."""

from __future__ import annotations

LEAST_TOKENS = 4096  # of a sequence, on each of the devices that share it


def shared_sequences(devices: int, tokens: int) -> list[int]:
    """Numbers of devices that may share a sequence of `tokens`: 1, and powers of two that leave each enough."""
    counts = (2**n for n in range(devices.bit_length()))
    return [n for n in counts if n == 1 or (devices % n == 0 and tokens // n >= LEAST_TOKENS)]
