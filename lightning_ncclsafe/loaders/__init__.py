"""Dataloaders of several ranks: whether they agree before they are used, how they end together, how many workers fit.

The door is ``collecting``, which has the loaders of a stage. ``agreement`` compares them, ``lockstep`` votes on their
end, ``iteration`` lets a loader keep its type meanwhile, ``tuning`` gives them workers. Imports probes, the exchange,
rules and report.
"""
