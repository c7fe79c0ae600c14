"""What can be seen from one rank: its collectives, its stacks, its Trainer, its host."""
