"""Looking at a job from outside, that nobody has prepared for it: which processes are ranks, and what they do.

The door is ``inspection``: diagnoses of the jobs of this host. ``ranks`` finds the processes, ``looks`` looks at them,
``trainer_frames`` reads from their stacks where Lightning stands, ``recorders`` asks those Flight Recorders that can be
asked, and ``joining`` puts the hosts of one job together. Nothing here changes anything: no signal is sent, no process
is stopped, and no code is put into any, unless whoever looks allows it (``may_write``, ``may_stop``).
"""
