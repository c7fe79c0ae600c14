"""What causes share: questions to the facts of a job, and the words and sentences that findings are made of.

Most begin with ``timeline``: who waits, who is behind, what each rank does. Knows no cause.
"""
