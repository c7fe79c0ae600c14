"""Looking at a job from outside, that nobody has prepared for it: which processes are ranks, and what they do.

The door is ``inspection``: diagnoses of the jobs of this host. ``ranks`` finds the processes, ``looking_on`` looks at
them until it shows whether one hangs. It asks ``looks`` for stacks, ``from_memory`` for objects, ``surroundings`` for
workers, files and host, ``recorders`` for those Flight Recorders that can be asked. ``trainer_frames`` reads from
stacks where Lightning stands, ``facts_of_looks`` makes facts of it all, and ``joining`` puts the hosts of one job
together. Nothing here changes anything: no signal is sent, no process is stopped, and no code is put into any, unless
whoever looks allows it (``may_write``, ``may_stop``).
"""
