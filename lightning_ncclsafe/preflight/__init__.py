"""Hosts are checked before training: ``probe`` looks at one, ``check`` compares those of all ranks and is the door.

Imports probes, the exchange, rules and report.
"""
