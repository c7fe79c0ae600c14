"""Reads what a run has left behind, for ``ncclsafe diagnose``: dumps, logs and reports, untrusted, become facts.

The entry point is ``evidence``: the contents of paths, as jobs. ``dumps`` reads Flight Recorder dumps, ``logs`` reads
logs by their ``lines`` (single ``statements``, messages ``spanning`` several lines, ``tracebacks``, PyTorch's
``watchdog`` and ``fingerprints`` of calls, ``starts`` and ends), and ``merging`` makes one job of several files. What
follows from the facts is decided in ``rules.recorded``. Imports facts, the recorder's model, rules and report; neither
torch nor Lightning.
"""
