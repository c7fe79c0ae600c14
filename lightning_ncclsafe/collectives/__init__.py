"""Times the collectives of a run: reads the recorder, brings all ranks together, finds who is late.

``timer`` is the entry point: on a thread, it reads with ``recording`` and shares with ``tree``. ``results`` shows what
was found; ``clocks`` measures how hosts' clocks differ. Imports timing, the exchange and report.
"""
