"""Files for ui.perfetto.dev: ``collectives`` of a run that was timed, and one ``incident``."""
