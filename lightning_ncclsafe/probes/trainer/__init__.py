"""Observes Lightning's Trainer by duck type: its progress, its actions, and what each batch produced."""
