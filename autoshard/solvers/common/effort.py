"""Limits of all methods: how long they go on, how much they hold, and when a gap is small enough.

Shared where the separate numbers of before changed no plan by more than 0.3 % (53 solves and plans: GPT-2, Llama-8B,
Mixtral, T5, Whisper, ResNet on 2x2 to 4x8x8 devices, with and without limits on memory).
"""

BUDGET_ENTRIES = 300_000_000  # 8 bytes each, of all tables of an exact solve together
SOON_ENTRIES = 20_000_000  # the same, where a good plan is enough, or tables are asked for again and again
SMALL_ENTRIES = 4_000_000  # the same, of a small part of a problem, or where every layer is another one
WORK_PER_ENTRY = 8  # joint entries minimised per entry of the budget: the limit on time

CLOSE = 1e-4  # relative gap that is not worth another round
LOOSE = 1e-3  # the same under a memory limit: what one layer weighs
ROUGHLY = 3e-3  # the same where prices are rough or other plans are compared

FIRST = 4  # rounds before anything is decided by them
ROUNDS = 8  # of a method that gains less each time
MOST_ROUNDS = 40  # of one that ends by itself
FEW, SOME = 6, 16  # choices of each node that are left in small tables, and next to other methods
WIDE = 128  # choices of a node: below, exact elimination is quick itself
PLANS = 12  # that are kept to begin from
SHARE = 0.5  # of the time that is left, for one of several methods
