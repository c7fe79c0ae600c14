"""Loggers off the training thread: what a program logs is staged on a local disk, and delivered from there.

There are three entry points: ``starting`` takes a logger off the training thread, ``offload`` is one that is off it,
and ``recovery`` delivers what a dead process has left.

The way of a logged point: a backend (``calls_backend``, or one of the two on ``files_backend``: ``tensorboard_backend``
and ``csv_backend``) captures the call and puts it into the ``intake``, a queue in memory; the ``stager`` writes it to
the ``store``, on the local disk; ``delivery`` calls the logger with it, or appends it to the ``files`` of a destination
(``destinations``). ``segments`` are the files of the store, in a folder that ``staging`` creates and claims for this
process. ``ledger`` counts what became of everything. Imports facts, report and settings.
"""
