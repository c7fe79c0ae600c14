"""Checkpoints of a run that is being ended, made beside its training thread and without a collective.

``ledger`` knows at each step's boundary what belongs together, ``saving`` writes it. Imports the exchange and what
prints to the user.
"""
