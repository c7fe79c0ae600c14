"""What one rank can see: its process, its Trainer, its data, its GPU, its host and the network.

The entry point is ``rank``: all that a rank knows about itself, within a deadline. Imports ``facts``, ``code`` and
``rules.kit``, but never an exchange.
"""
