import signal


class ParseTimeout(Exception):
    pass


def expired(signum, frame):
    raise ParseTimeout()


class TimeLimit:
    """Some HTML bodies keep the parser busy for minutes; they are given a few seconds."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.previous = None

    def start(self):
        self.previous = signal.signal(signal.SIGALRM, expired)
        signal.alarm(self.seconds)

    def stop(self):
        signal.alarm(0)

    def restore(self):
        signal.signal(signal.SIGALRM, self.previous)
