"""Whose code a stack frame is in and what it means; and replacing methods of other code temporarily.

``marks`` is what functions of this package declare, ``libraries`` the one table of files and functions of others.
``own_work`` notes when this package keeps a rank busy, ``patching`` replaces methods, ``raised`` is what an exception
says, and ``side_thread`` makes calls that may never return.
Imports nothing of this package.
"""
