"""Reads what a run has left behind, dumps, logs and reports: untrusted bytes become facts.

The door is ``evidence``: all that paths hold, as jobs. Imports facts, the recorder's model and rules; neither torch nor
Lightning.
"""
