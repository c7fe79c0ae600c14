"""Times the collectives of a run: reads the recorder, brings all ranks together, tells who is late."""
