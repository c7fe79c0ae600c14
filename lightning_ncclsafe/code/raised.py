"""What an exception says."""


def text_of(error: BaseException) -> str:
    """The text of an exception; one whose own code for that fails has the text that Python's tracebacks give it."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"
