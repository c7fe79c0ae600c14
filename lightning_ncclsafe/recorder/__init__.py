"""PyTorch's Flight Recorder: what its entries and counters mean, on a rank or in a dump, for every back end.

The only module is ``model``. Reading the recorder is elsewhere: in this process ``_torch.recorders`` (with
``probes.process.flight_recorder`` at an incident, ``collectives.recording`` all the time), in another process
``inspecting.recorders``, and in a file ``reading.dumps``. Imports nothing of this package.
"""
