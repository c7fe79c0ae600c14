"""Dataloaders and their data, as short hashes and numbers that ranks can compare; nothing is drawn or changed.

``loaders`` describes a loader, with the ``fingerprints`` of its data, which hash ``plain_values``; ``reading`` is how
the user's objects are asked, and ``random_state`` is read beside them. ``data_line`` finds the line that decides how
much data a rank has, with ``made_at`` and ``shares``.
"""
