"""Loggers off the training thread: what they are given is staged on a local disk, then delivered in its own time."""
