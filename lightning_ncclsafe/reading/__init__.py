"""Reading what a run has left behind, dumps, logs and reports: bytes that nobody vouches for become facts."""
