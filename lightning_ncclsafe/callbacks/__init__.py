"""Callbacks: what a user sets beside the strategy."""
