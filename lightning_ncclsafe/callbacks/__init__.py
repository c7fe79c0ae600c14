"""Callbacks: their arguments, and which package does the work of each. The classes here end in ``Hooks``.

``declared`` has those that are arguments only: the strategy reads them and acts (``strategies.features``).
``collective_timer`` and ``logger_offload`` also have hooks of their own; ``recommended`` is ``safe_callbacks``.
``lightning_ncclsafe.lightning`` and ``lightning_ncclsafe.pytorch_lightning`` make the public classes of these, each
from the ``Callback`` of its Lightning. Imports strategies, and the packages that do the work.
"""
