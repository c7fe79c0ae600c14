"""Storage: directories that are tried out by processes that may hang, and what storage is on a network."""
