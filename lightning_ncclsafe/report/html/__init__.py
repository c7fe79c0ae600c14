"""A diagnosis as one page for a browser; ``page`` is the entry point.

The ``answer`` comes first, then the ``picture`` of ranks against time, then the ``facts`` of each rank, with their
``stacks`` and ``tables``.
"""
