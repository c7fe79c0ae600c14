"""What a rule is."""

from collections.abc import Callable, Iterable

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.findings import Finding

Rule = Callable[[JobFacts], Iterable[Finding]]
"""A plain function named after its cause; its docstring (Symptom, Cause, Remedy, Cannot see) is what ``ncclsafe explain
NAME`` prints."""


def name_of(rule: Rule) -> str:
    """The rule's public name, which is that of its cause: ``"rank-zero-only-work"``."""
    return getattr(rule, "__name__", "rule").replace("_", "-")
