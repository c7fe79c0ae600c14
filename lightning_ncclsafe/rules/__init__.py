"""Facts to findings: one file for each cause, listed by its package; ``judging.py`` asks them all.

``hang``: why ranks wait. ``agreement``: what ranks disagree about. ``preflight``: what is wrong with hosts.
``recorded``: what a run has left behind. What several causes ask is in the files beside them.
"""
