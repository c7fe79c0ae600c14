"""Turns facts into findings: ``judging`` is the entry point and asks all rules.

``hang``: why ranks wait, one cause per file or folder. ``recorded``: what a run has left behind. ``agreement``: what
ranks disagree about. ``preflight``: what is wrong with hosts. The declaration of a rule decides its place; there is no
list to maintain. ``kit``: what rules share. ``common_paths``: one path for a file that hosts have in different folders.
``expected_waits``: whether a wait is so usual that it is too early to ask. Imports facts and the meaning of code,
neither torch nor Lightning.
"""
