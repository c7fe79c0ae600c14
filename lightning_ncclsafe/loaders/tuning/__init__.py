"""Workers and prefetched batches of dataloaders, fitted to the host and to the step.

To be read in this order: ``tuner`` (one rank's part, and the door), ``budget``, ``kinds`` of loaders and their
``eligibility``, ``measuring``, ``deciding`` on rank 0 by ``trials``, and ``resizing`` a live loader's ``worker_pool``.
"""
