"""Facts to findings: one file for each cause, listed by its package; ``judging`` is the door and asks them all.

``hang``: why ranks wait. ``agreement``: what they disagree about. ``preflight``: what is wrong with hosts.
``recorded``: what a run has left behind. ``kit``: what causes share. Imports facts and what code means,
neither torch nor Lightning.
"""
