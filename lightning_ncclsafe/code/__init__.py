"""Whose code a stack frame is in, and what it means: rules ask this instead of naming files and functions themselves.

``libraries`` is the one table of files and functions of torch, Lightning and others; ``marks`` are what functions of
this package declare about themselves. Beside them, small tools for code of others: ``patching`` replaces a method for a
while, ``side_thread`` makes calls that may never return, ``own_work`` notes when this package keeps a rank busy,
``raised`` is what an exception says, and ``this_host`` which host this is. Imports nothing of this package.
"""
