"""This host: memory, swap, cores and processes, and what its control groups allow.

``resources`` is what there is and what is used, ``capacity`` what this process may use, by its ``cgroups``; ``swap`` is
measured between two looks.
"""
