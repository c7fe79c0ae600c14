"""Checkpoints of a run that is being ended, made beside its training thread and without a collective, and gone on from.

``ledger`` notes the boundary of each step: which ``counters`` belong to which ``weights``. ``saving`` writes what it
knows, once ``candidates`` has agreed with all ranks on who does. Of a model that is split among ranks ``shards`` reads
one rank's part, ``joined`` compares what all have written, and ``together`` makes one checkpoint of it. ``resuming`` is
the door of the next start: ``finding`` knows which checkpoint, ``position`` which batch, with ``loader_position`` for
one loader, and ``left_behind`` that of a rank that is silent. Imports the exchange and what prints to the user.
"""
