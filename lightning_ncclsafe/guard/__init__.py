"""One rank's guard: notices that the rank stands still, has all ranks asked, reports, and ends a run that cannot go on.

The door is ``guard``. ``watchdog`` and ``thresholds`` say when, ``incident_log`` is what ranks agree on, ``gathering``
brings facts together, ``reporter`` tells, ``ending`` ends. Imports probes, the exchange, rules and report; Lightning is
not known here.
"""
