"""Facts to findings: ``judging`` is the door and asks all rules, ``causes`` lists them.

``hang``: why ranks wait, one cause per file. ``recorded``: what a run has left behind. ``agreement``: what ranks
disagree about. ``preflight``: what is wrong with hosts. A rule takes its place by its declaration; there is no list
to be kept. ``kit``: what rules share. Imports facts and what code means, neither torch nor Lightning.
"""
