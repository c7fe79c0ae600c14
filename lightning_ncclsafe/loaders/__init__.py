"""Dataloaders of several ranks: whether they agree before they are used, and how they end together."""
