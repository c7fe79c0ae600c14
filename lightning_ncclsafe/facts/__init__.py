"""What ranks saw, and what a job is: the data that is shared, judged and reported, and nothing that acts on it.

All types are imported from here. ``job`` puts together what the others describe: ``frames``, ``collectives``,
``processes``, the ``trainer``, its ``data``, the ``machine``, and what was ``recorded``. Beside them, ``findings`` is
what rules conclude, ``codec`` writes both as JSON, ``phase_kinds`` is what is known of the phases of a run, and
``wording`` puts ranks, durations, sizes and places into words.
Imports nothing of this package.
"""

from lightning_ncclsafe.facts.collectives import *
from lightning_ncclsafe.facts.data import *
from lightning_ncclsafe.facts.frames import *
from lightning_ncclsafe.facts.job import *
from lightning_ncclsafe.facts.machine import *
from lightning_ncclsafe.facts.preflight import *
from lightning_ncclsafe.facts.processes import *
from lightning_ncclsafe.facts.recorded import *
from lightning_ncclsafe.facts.trainer import *
