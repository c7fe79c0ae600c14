"""Loops over sets, in whose order each process may go through them differently, and what only looks like one."""

import ast

import pytest

from lightning_ncclsafe.probes.source.set_loops import loop_over_set

FUNCTION = """
import torch.distributed as dist
NAMES = {"text", "image"}
PLACES = {3, 1, 2}

class Net:
    def __init__(self, names, pairs):
        self.names = {name for pair in pairs for name in pair}
        self.listed = list(self.names)
        self.given = names
        self.both = {"a"}
        self.both = ["a"]

    def step(self, values, more):
        own = {*more}
        twice = {"a"}
        twice = sorted(twice)
        BEFORE
        HERE
"""


def over(loop: str, before: str = "pass") -> str:
    """The loop over a set around the marked line of a step that has this loop."""
    code = loop.replace("\n", "\n        ")
    text = FUNCTION.replace("BEFORE", before).replace("HERE", code)
    line = next(number for number, one in enumerate(text.splitlines(), 1) if "reduce(" in one)
    return loop_over_set(ast.parse(text), line)


@pytest.mark.parametrize(
    "items",
    [
        "{'text', 'image'}",
        "set(values)",
        "frozenset(values)",
        "self.names",
        "self.listed",
        "NAMES",
        "own",
        "list(own)",
        "enumerate(NAMES)",
        "zip(own, values)",
        "own | {1}",
        "values - own",
        "own.union(values)",
        "{value.name for value in values}",
        "dict.fromkeys(own)",
        "map(str, own)",
    ],
)
def test_a_loop_over_a_set(items: str) -> None:
    assert over(f"for one in {items}:\n    reduce(one)") == f"for one in {items}  (line 19)"
    assert over(f"[reduce(one) for one in {items}]") == f"for one in {items}  (line 19)"


@pytest.mark.parametrize(
    "items",
    [
        "values",
        "sorted(own)",
        "sorted(set(values))",
        "self.given",
        "self.both",
        "self.unknown",
        "PLACES",
        "{1, 2}",
        "set(range(3))",
        "twice",
        "more",
        "['text', 'image']",
        "unknown",
        "values.union",
        "dict(values)",
    ],
)
def test_a_loop_over_anything_else(items: str) -> None:
    assert over(f"for one in {items}:\n    reduce(one)") == ""


def test_a_parameter_hides_a_set_of_the_file() -> None:
    text = "own = {'a'}\ndef step(own):\n    for one in own:\n        reduce(one)\n"
    assert loop_over_set(ast.parse(text), 4) == ""
    assert loop_over_set(ast.parse(text.replace("step(own)", "step()")), 4) == "for one in own  (line 3)"


def test_the_innermost_loop_over_a_set_counts_whatever_loops_are_in_it() -> None:
    nested = "for one in own:\n    for two in values:\n        reduce(one, two)"
    assert over(nested) == "for one in own  (line 19)"


@pytest.mark.parametrize(
    "code",
    [
        "for one in own:\n    pass\nreduce(values)",
        "def inner():\n    reduce(values)\nfor one in own:\n    inner()",
        "for one in own:\n    def inner():\n        reduce(values)",
        "for one in own:\n    pass\nelse:\n    reduce(values)",
    ],
)
def test_a_line_outside_of_the_loop_or_in_another_function(code: str) -> None:
    assert over(code) == ""


def test_a_name_that_is_given_in_circles_is_no_set() -> None:
    assert over("for one in first:\n    reduce(one)", "first = second; second = first") == ""
