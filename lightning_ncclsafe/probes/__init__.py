"""What one rank can see: its process, its Trainer, its data, its GPU, its host and their network.

The door is ``rank``: all that a rank knows of itself within a deadline. Imports facts, what code means, and
what rules ask of facts; never an exchange.
"""
