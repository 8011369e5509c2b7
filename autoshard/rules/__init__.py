"""Rules: each operator's loops, and the strategies that follow."""

from autoshard.rules.algebra.instance import Instance, TensorFacts, bind
from autoshard.rules.algebra.notation import Dim, Rule, RuleError, Term
from autoshard.rules.algebra.strategy import Choice, Strategy
from autoshard.rules.enumerate import carry, explain, find, named, offered, strategies
from autoshard.rules.granularities import Granularities, granularities
from autoshard.rules.host_tables import host_problem, host_strategies, host_tables
from autoshard.rules.localise import LocalCall, localise
from autoshard.rules.operator_table import has_rule, instance
from autoshard.rules.operators import OPERATORS

__all__ = [
    "OPERATORS",
    "Choice",
    "Dim",
    "Granularities",
    "Instance",
    "LocalCall",
    "Rule",
    "RuleError",
    "Strategy",
    "TensorFacts",
    "Term",
    "bind",
    "carry",
    "explain",
    "find",
    "granularities",
    "has_rule",
    "host_problem",
    "host_strategies",
    "host_tables",
    "instance",
    "localise",
    "named",
    "offered",
    "strategies",
]
