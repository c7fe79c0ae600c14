"""This host: memory, swap, cores and processes, and what its control groups allow."""
