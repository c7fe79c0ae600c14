"""Findings in words and as data: the last rendering of a diagnosis, never a source of facts.

``folder`` writes all files of one incident: ``json``, ``text`` and ``html``. ``terminal`` prints lines to the user,
``tables`` and ``trace`` show what was compared and timed. Imports facts, rules and timing.
"""
