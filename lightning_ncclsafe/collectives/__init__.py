"""Times the collectives of a run, for ``CollectiveTimer``. The arithmetic, who was late and by how much, is ``timing``.

``timer`` is the entry point: on a thread of each rank, it reads the Flight Recorder with ``recording`` and sends what
it read to rank 0 with ``tree``. ``clocks`` measures how hosts' clocks differ, by the rules of ``alignment``;
``results`` shows what was found. Imports timing, the exchange and report.
"""
