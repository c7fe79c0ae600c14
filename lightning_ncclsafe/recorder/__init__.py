"""PyTorch's Flight Recorder: what its entries and counters mean, on a rank or in a dump, for every back end.

The door is ``model``. The recorder is read in ``_torch``, ``probes.process.flight_recorder`` and ``reading.dumps``.
Imports nothing of this package.
"""
