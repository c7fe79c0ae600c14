"""What code is: whose a stack frame is and what it means, and how ours takes part in that of others.

``marks`` is what functions of ours say of themselves, ``libraries`` the one table of files and functions of others.
``side_thread`` makes calls that may never return.
Imports nothing of this package.
"""
