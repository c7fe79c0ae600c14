"""Loggers off the training thread: what they are given is staged on a local disk, then delivered in its own time.

The doors are ``starting``, which takes a logger off the thread, ``live``, all that are off it, and ``recovery``, what a
process that is gone has left. Imports facts, report and settings.
"""
