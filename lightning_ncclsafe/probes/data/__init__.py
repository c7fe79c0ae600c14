"""Dataloaders and what is in them, as short hashes and numbers that ranks can compare; nothing is drawn or changed."""
