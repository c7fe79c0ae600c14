"""Workers and prefetched batches of dataloaders, fitted to the host and to the step."""
