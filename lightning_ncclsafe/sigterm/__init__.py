"""SIGTERM: ``agreement`` is where all ranks stop, ``handler`` takes the place of Lightning's own."""
