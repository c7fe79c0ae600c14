"""This process: its stacks, exceptions, children and environment, and what its Flight Recorder has recorded.

What a thread does: ``stacks`` of ``thread_frames``, with the source of their lines; ``stack_samples``, ``breakpoints``,
exceptions that were ``caught``, and the kernel's counters of the ``main_thread``. What it waits for: ``thread_waits``,
``lock_waits`` for files, a ``polled_path``, ``outside_waits`` for other processes, ``garbage``; ``asleep`` is a process
that can never go on. How processes end: a dying one writes to its ``crash_file``, or has written when it was
``last_seen``, which others read as ``crash_traces``; ``child_crashes``, ``ended_children`` and their ``exit_status``;
``stopping`` finds what may have stopped one. ``traceback_signal`` asks processes that cannot answer. ``environment``,
``growth`` and ``open_files`` are about the process as a whole, ``flight_recorder`` about its collectives.
"""
