"""A diagnosis in words and as data. Nothing is concluded here: the sentences of findings are made by the rules.

``folder`` writes all files of one incident: ``json``, ``text`` and ``html``. ``terminal`` prints lines to the user,
``tables`` and ``trace`` show what was compared and timed. Imports facts, rules and timing.
"""
