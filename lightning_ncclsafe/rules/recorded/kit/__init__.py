"""What rules about recordings share.

``roots`` is what most of them read: where waiting ends, and why. It draws the graph of who waits for whom from the
``calls`` of all ranks. ``divergences`` are calls that differ under one number, ``ends`` how ranks ended, ``statements``
what lines of a log state, and ``evidence`` the words.
"""
