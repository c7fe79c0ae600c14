"""Whose code a stack frame is in and what it means; and replacing methods of other code temporarily.

``marks`` is what functions of this package declare, ``libraries`` the one table of files and functions of others.
``side_thread`` makes calls that may never return.
Imports nothing of this package.
"""
