"""A diagnosis as one page for a browser; the door is ``page``."""
