"""What can be seen from one rank: its process, its Trainer, its data, its GPU, its host and their network.

The door is ``rank``: everything that a rank can say about itself within a deadline. Imports facts, what code means, and
what rules ask of facts; never an exchange.
"""
