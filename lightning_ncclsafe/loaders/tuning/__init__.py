"""Workers and prefetched batches of dataloaders, fitted to the host and to the step: the work of ``LoaderTuner``.

Read it in this order: ``tuner`` (the entry point, one rank's part), ``budget`` (what the host has room for), ``kinds``
of loaders and their ``eligibility``, ``measuring``, ``deciding`` on rank 0 by ``trials``, and ``resizing``, which
changes a live loader's ``worker_pool``. Imports ``_torch``, the exchange and report.
"""
