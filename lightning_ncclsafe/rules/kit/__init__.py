"""What causes share, and its door: how a rule is declared, what it asks about a job, in which words it answers.

``rule`` has the declaration, ``timeline`` who waits and who is behind, ``activity`` what each rank does,
``sentences`` and ``wording`` what findings are made of. The others are questions to the facts: ``divergences``,
``shifts``, ``apart``, ``lines``, ``positions``, ``passes``, ``alone``, ``silence``, ``overruns``, ``caught``,
``machine``, ``errors``, ``meaning``; before training ``hosts`` and ``data``. Knows no cause.
"""

from lightning_ncclsafe.facts.findings import Confidence as Confidence
from lightning_ncclsafe.facts.findings import Diagnosis as Diagnosis
from lightning_ncclsafe.facts.findings import Evidence as Evidence
from lightning_ncclsafe.facts.findings import Finding as Finding
from lightning_ncclsafe.facts.findings import Plan as Plan
from lightning_ncclsafe.facts.findings import Severity as Severity
from lightning_ncclsafe.rules.kit.activity import *
from lightning_ncclsafe.rules.kit.alone import *
from lightning_ncclsafe.rules.kit.apart import *
from lightning_ncclsafe.rules.kit.caught import *
from lightning_ncclsafe.rules.kit.data import *
from lightning_ncclsafe.rules.kit.divergences import *
from lightning_ncclsafe.rules.kit.errors import *
from lightning_ncclsafe.rules.kit.expected import *
from lightning_ncclsafe.rules.kit.hosts import *
from lightning_ncclsafe.rules.kit.kinds import *
from lightning_ncclsafe.rules.kit.lines import *
from lightning_ncclsafe.rules.kit.locks import *
from lightning_ncclsafe.rules.kit.machine import *
from lightning_ncclsafe.rules.kit.meaning import *
from lightning_ncclsafe.rules.kit.overruns import *
from lightning_ncclsafe.rules.kit.passes import *
from lightning_ncclsafe.rules.kit.positions import *
from lightning_ncclsafe.rules.kit.rule import *
from lightning_ncclsafe.rules.kit.sentences import *
from lightning_ncclsafe.rules.kit.shifts import *
from lightning_ncclsafe.rules.kit.silence import *
from lightning_ncclsafe.rules.kit.timeline import *
from lightning_ncclsafe.rules.kit.wording import *
