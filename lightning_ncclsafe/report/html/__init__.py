"""A diagnosis as one page for a browser; ``page`` is the entry point."""
