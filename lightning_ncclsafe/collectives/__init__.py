"""Times the collectives of a run: reads the recorder, brings all ranks together, finds who is late.

The door is ``attaching``. ``recording`` reads, ``tree`` shares, ``timer`` does both on a thread, ``results`` shows;
``clocks`` is how hosts' clocks differ. Imports timing, the exchange and report.
"""
