"""Checkpoints of a run that is being ended, made on a thread of their own and without a collective; and resuming.

``ledger`` notes the ``boundary`` of each step: which counters belong to which ``weights``. ``saving`` writes them, once
``candidates`` has agreed with all ranks on who does. If a model is sharded, ``shards`` reads one rank's shard, and
``sharded_save`` makes one checkpoint of all. ``resuming`` is the entry point of the next start: ``finding`` chooses
the checkpoint, ``position`` the batch, with ``loader_position`` for one loader; ``position_file`` keeps the position of
a rank that can no longer answer. Imports the exchange and what prints to the user.
"""
