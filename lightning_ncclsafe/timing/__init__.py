"""Derives, from the times of collectives, which rank was late, in which phase, and what was transfer and what waiting.

The entry point is ``analysis``, on rank 0. ``windows`` is what ranks send it, ``matching`` finds the calls of one
collective, ``lateness`` compares them, ``stragglers`` names a rank that is late repeatedly, and ``summary`` and
``history`` are the results. Pure functions over recorded numbers (``collectives`` records and shares them); imports
neither torch nor Lightning.
"""
