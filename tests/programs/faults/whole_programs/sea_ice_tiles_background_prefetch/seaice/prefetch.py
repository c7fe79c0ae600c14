import logging
import queue
import threading

log = logging.getLogger(__name__)
END = object()


class Prefetcher:
    """Runs an iterator in a thread and keeps up to `depth` items ready."""

    def __init__(self, source, depth: int = 16):
        self.items = queue.Queue(depth)
        self.thread = threading.Thread(target=self._fill, args=(source,), name="prefetch", daemon=True)
        self.thread.start()

    def _fill(self, source):
        try:
            for item in source:
                self.items.put(item)
            self.items.put(END)
        except Exception as error:
            log.debug("prefetch ended: %s", error)

    def __iter__(self):
        while True:
            item = self.items.get()  # <- here
            if item is END:
                return
            yield item
