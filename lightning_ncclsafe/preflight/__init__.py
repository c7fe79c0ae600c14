"""Compares the hosts of a job before training: ``check`` is the entry point, ``probe`` examines this rank's host.

``load`` is what the run will need of the host: memory of the model, workers and batches of the loaders. What counts as
a problem is decided in ``rules.preflight``. Imports probes, the exchange, rules and report.
"""
