"""Dataloaders and their data, as short hashes and numbers that ranks can compare; nothing is drawn or changed."""
