"""Saves a run that is being ended, on a separate thread and without a collective, and resumes it at the next start.

To save: ``ledger`` notes at the ``boundary`` of each step which counters belong to which ``weights``. ``saving``, the
entry point, writes their ``contents`` to the ``folder``, once ``candidates`` has agreed with all ranks on who does. If
a model is sharded, ``shards`` reads one rank's shard, and ``sharded_save`` makes one checkpoint of all.

To resume: ``resuming`` is the entry point. ``finding`` chooses the checkpoint, ``position`` the batch, with
``loader_position`` for one loader; ``position_file`` keeps the position of a rank that can no longer answer.
Imports ``_torch``, the exchange and report.
"""
