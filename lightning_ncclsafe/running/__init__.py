"""The guard for unmodified programs (``ncclsafe run``): every Trainer gets it, if its strategy supports it.

Python loads ``lightning_ncclsafe.pth`` at start-up. If NCCLSAFE is set in the environment, that file imports
``at_import``, which waits until the program imports Lightning. This happens in every process, because child processes
inherit the environment. Once a Trainer has been made, ``guarding`` gives its strategy the guard, by the ``variables``
in the environment. ``ncclsafe run`` only sets these and starts the program.
"""
