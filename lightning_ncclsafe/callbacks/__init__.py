"""Callbacks: what a user sets beside the strategy, each with its arguments and what it asks of the rooms below.

The classes themselves are made in ``lightning_ncclsafe.lightning`` and its like. Imports the rooms that do the work.
"""
