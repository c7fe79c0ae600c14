"""One rank's guard: notices that the rank is stuck, has all ranks asked, reports, and ends a run that cannot continue.

The entry point is ``guard``; ``shared`` is what its parts share. In the order of an incident: ``watchdog`` measures
progress; ``stuck`` decides that the rank is stuck, by ``thresholds``, and writes to the log of incidents;
``participation`` takes part, by ``gathering`` and ``reporter``; ``ended_run`` and ``ending`` end the run; ``leaving``
is how a rank leaves its call. Imports probes, the exchange, rules and report; Lightning is not known here.
"""
