"""Rules: what each operator's loops are, and the ways to split it that follow. Reading `table.RULES` is reading what is known."""

from autoshard.rules.candidates import Candidates, candidates
from autoshard.rules.enumerate import explain, find, offered, strategies
from autoshard.rules.instance import Facts, Instance, bind
from autoshard.rules.localise import LocalOp, localise
from autoshard.rules.notation import Dim, Rule, RuleError, Term
from autoshard.rules.strategy import Choice, Strategy
from autoshard.rules.table import RULES, has_rule, instance

__all__ = [
    "RULES",
    "Candidates",
    "Choice",
    "Dim",
    "Facts",
    "Instance",
    "LocalOp",
    "Rule",
    "RuleError",
    "Strategy",
    "Term",
    "bind",
    "candidates",
    "explain",
    "find",
    "has_rule",
    "instance",
    "localise",
    "offered",
    "strategies",
]
