"""What is raised where a file cannot be read."""


class ReadingError(ValueError):
    """A file is not what it should be, is damaged, or is larger than what is read; the message says which."""
