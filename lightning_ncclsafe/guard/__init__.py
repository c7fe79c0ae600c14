"""One rank's guard: notices that the rank is stuck, has all ranks asked, reports, and ends a run that cannot continue.

The entry point is ``guard``; ``shared`` has what its parts share, with the log of incidents. In the order of an
incident: ``watchdog`` measures progress; ``stuck`` decides that the rank is stuck, by ``thresholds``, and writes to the
log; ``participation`` answers for this rank, by ``gathering`` and ``reporter``; ``after_verdict`` ends this rank,
and ``ending`` makes the process exit, without saving. Beside that, ``leaving`` is how a rank leaves its call of the
Trainer, ``group_timeouts`` sets the back end's limits, ``local_ranks`` and ``rank_hosts`` know the other ranks and
their hosts, ``witness`` is a process beside a rank that is alone on its host, and ``restarts`` reads the plan of the
previous start. Imports probes, the exchange, rules and report; Lightning is not known here.
"""
