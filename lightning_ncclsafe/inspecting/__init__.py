"""Inspects unprepared jobs from outside: which processes are their ranks, and what these do.

The entry point is ``inspection``. ``ranks`` finds the processes. ``inspected_ranks`` looks at them until it is clear
whether one hangs, and at their workers, files and host: it asks ``looks`` for stacks, ``rank_objects`` for exceptions,
counters and groups in a rank's memory (read by ``objects``, with ``layouts`` of this Python), ``recorders`` for Flight
Recorders, and ``sources`` for source files. ``trainer_frames`` recognises Lightning's loops in stacks,
``facts_of_looks`` makes the facts that rules judge, and ``diagnosing`` judges them and joins those of several hosts.
Nothing here changes a process: none is signalled or stopped and no code is injected, unless the caller allows it
(``may_write``, ``may_stop``).
"""
