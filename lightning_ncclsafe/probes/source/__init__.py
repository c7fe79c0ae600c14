"""The user's source: its functions, and what decides whether a line of it is reached. It is parsed, never executed.

``scopes`` gives functions, and what they call and set; ``control_flow`` what decides about a line, for which
``rank_names`` knows what means the rank, ``common_conditions`` what is the same on all ranks, and ``handlers`` what
ends an exception. ``assignments`` finds what gave a variable its value, and ``exit_calls`` what ends a process, for
which ``left_timers`` knows where a timer is left set; ``transactions`` finds where a database is left locked, and
``unordered`` loops that each process goes through in an order of its own. ``syntax`` reads and parses files for all.
"""
