"""Checks hosts before training: ``probe`` examines one, and ``check``, the entry point, compares those of all ranks.

Imports probes, the exchange, rules and report.
"""
