"""The guard for programs that know nothing of it: every Trainer they make gets it, where its strategy can have it.

``lightning_ncclsafe.pth`` lies where Python looks for its packages. If NCCLSAFE is set in the environment, it has
``at_import`` wait for Lightning to be imported, in whatever process: launchers, spawn and programs of the program's own
hand the environment on. Once a Trainer has been made, ``standing_in`` gives its strategy the guard, by what
``variables`` reads from the environment. ``ncclsafe run`` only sets these and starts the program.
"""
