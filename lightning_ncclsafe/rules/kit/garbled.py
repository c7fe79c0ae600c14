"""Errors of ranks that have taken another collective's numbers for the length of their own objects."""

import re

from lightning_ncclsafe.facts import ExceptionFacts

# As torch's allocators say it: "Tried to allocate more than 1EB memory", "… 8589934592.00 GiB", that of CPUs in bytes.
_WANTED = re.compile(r"allocate (?:more than )?(?P<count>\d+(?:\.\d+)?) ?(?P<unit>EB|EiB|PiB|TiB|GiB|bytes)")
_BYTES = {"EB": 10**18, "EiB": 2**60, "PiB": 2**50, "TiB": 2**40, "GiB": 2**30, "bytes": 1}
# No host and no GPU has as much.
_ABSURD_BYTES = 10**14


def is_garbled(error: ExceptionFacts) -> bool:
    """Whether it has tried to allocate what nobody has: the size was no size."""
    found = _WANTED.search(error.message)
    return found is not None and float(found["count"]) * _BYTES[found["unit"]] >= _ABSURD_BYTES
