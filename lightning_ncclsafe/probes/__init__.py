"""What one rank can see: its process, its Trainer, its data, its GPU, its host and the network.

The entry point is ``rank``: all that a rank knows about itself, within a deadline, as ``RankFacts``. ``peers`` are the
other ranks of its host as it sees them from outside, by the ``rank_info`` that they publish. ``machine_state`` is what
delayed the rank in the last seconds besides its code; ``absent`` reads what a host may not provide. Imports ``facts``,
``code`` and ``rules.kit``, but never an exchange: probes see one rank, and its host.
"""
