"""SIGTERM, without a broadcast before every batch: ``agreement`` decides where all ranks stop.

``handler``, the entry point, replaces Lightning's own handling. Imports the exchange and what prints to the user.
"""
