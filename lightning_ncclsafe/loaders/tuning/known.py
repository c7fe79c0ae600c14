"""What one window of measures does not show, but others before it did."""

from dataclasses import replace

from lightning_ncclsafe.loaders.tuning.measures import Measures


class Known:
    """Remembers sizes, and how slow slow batches are."""

    def __init__(self) -> None:
        self._worker_bytes = 0
        self._batch_bytes = 0
        self._slowness = 0.0

    def forget_slow_batches(self) -> None:
        """What is measured has changed."""
        self._slowness = 0.0

    def added_to(self, measures: Measures) -> Measures:
        """The measures with the largest sizes so far, and with the slowest batches, against the others.

        Memory that was needed once will be needed again; few batches of a window hardly ever show how slow slow ones
        are.
        """
        self._worker_bytes = max(self._worker_bytes, measures.worker_bytes)
        self._batch_bytes = max(self._batch_bytes, measures.batch_bytes)
        if measures.service_s > 0:
            self._slowness = max(self._slowness, measures.service_q97_s / measures.service_s)
        return replace(
            measures,
            worker_bytes=self._worker_bytes,
            batch_bytes=self._batch_bytes,
            service_q97_s=self._slowness * measures.service_s,
        )
