import signal


class DecodeTimeout(Exception):
    pass


def _raise(signum, frame):
    raise DecodeTimeout


def bounded(seconds):
    """Decorator: give up a decode that takes longer than `seconds`."""

    def wrap(decode):
        def inner(*args):
            previous = signal.signal(signal.SIGALRM, _raise)
            signal.alarm(seconds)  # <- here
            try:
                clip = decode(*args)
                if clip is None:
                    return None
                signal.alarm(0)
                return clip
            except DecodeTimeout:
                return None
            finally:
                signal.signal(signal.SIGALRM, previous)

        return inner

    return wrap
