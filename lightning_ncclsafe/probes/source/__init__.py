"""The user's source: its functions, and what decides whether a line of it is reached. It is parsed, never executed.

``scopes`` gives functions, and what they call and set; ``control_flow`` what decides about a line, for which
``rank_names`` knows what means the rank, and ``handlers`` what ends an exception. ``assignments`` finds what gave a
variable its value, and ``exit_calls`` what ends a process, for which ``left_timers`` knows where a timer is left set;
``transactions`` finds where a database is left locked.
``syntax`` reads and parses files for all.
"""
