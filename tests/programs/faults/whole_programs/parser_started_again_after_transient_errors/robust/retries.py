import logging
import time

log = logging.getLogger("robust")


def with_retries(function, attempts=4, pause=2.0, errors=(OSError, ValueError)):
    """Storage fails now and then: try again instead of losing the night."""
    for attempt in range(1, attempts + 1):
        try:
            return function()
        except errors as error:  # <- here
            if attempt == attempts:
                raise
            log.warning("attempt %d failed (%s), again in %.0f s", attempt, error, pause)
            time.sleep(pause)
