"""Callbacks: their arguments, and what each asks of the rooms that do the work.

``lightning_ncclsafe.lightning`` and ``lightning_ncclsafe.pytorch_lightning`` make the public classes of these.
"""
