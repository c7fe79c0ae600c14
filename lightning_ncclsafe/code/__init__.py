"""Knows code: whose a stack frame is and what it means; and replaces methods of other code for a while.

``marks`` is what functions of this package declare, ``libraries`` the one table of files and functions of others.
``side_thread`` makes calls that may never return.
Imports nothing of this package.
"""
