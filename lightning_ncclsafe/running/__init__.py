"""The guard for unmodified programs: every Trainer that they make gets it, if its strategy supports it.

``lightning_ncclsafe.pth`` lies where Python looks for its packages. If NCCLSAFE is set in the environment, it has
``at_import`` wait for Lightning to be imported, in whatever process: launchers, spawn and programs of the program's own
hand the environment on. Once a Trainer has been made, ``guarding`` gives its strategy the guard, by what
``variables`` reads from the environment. ``ncclsafe run`` only sets these and starts the program.
"""
