"""SIGTERM, without a broadcast before every batch: all ranks stop before the same one.

``handler``, the entry point, replaces Lightning's own handling of the signal; ``agreement`` decides before which batch
ranks stop. Imports the exchange and report.
"""
