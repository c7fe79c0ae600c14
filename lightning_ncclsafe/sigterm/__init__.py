"""SIGTERM, without a broadcast before every batch: ``agreement`` decides where all ranks stop, ``handler`` is the door.

``handler`` takes the place of Lightning's own handling. Imports the exchange and what prints to the user.
"""
