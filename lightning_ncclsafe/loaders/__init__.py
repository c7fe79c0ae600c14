"""Dataloaders of several ranks: whether they agree before they are used, how they end together, how many workers fit.

``collecting`` is the entry point: it collects the loaders of a stage. ``agreement`` compares them, ``lockstep`` votes
on their end, ``iteration`` replaces how they are iterated, ``tuning`` gives them workers. Imports probes, the exchange,
rules and report.
"""
