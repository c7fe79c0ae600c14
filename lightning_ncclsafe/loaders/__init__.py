"""The dataloaders of all ranks: whether they agree before they are used, how they end together, how many workers fit.

``collecting`` is the entry point: it collects the loaders of a stage as Lightning prepares them. ``agreement`` compares
them between ranks, ``lockstep`` votes on whether each rank has a next batch, ``iteration`` replaces how a loader is
iterated, ``tuning`` gives it other workers. Imports probes, the exchange, rules and report.
"""
