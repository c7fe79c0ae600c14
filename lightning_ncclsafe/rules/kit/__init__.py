"""What rules share, all importable from here: how a rule is declared, what it asks about a job, and how it words it.

A new rule needs ``rule`` (its declaration), a view of the job, and words. The view of hang rules and of rules about
recordings is ``timeline``: who waits, who is behind, who is silent; ``activity`` is what each rank's main thread does.
Agreement rules have the view in ``data``, preflight checks the one in ``hosts``. ``sentences`` has the parts of
findings (where a rank is, what the others wait in, how we know), ``wording`` puts ranks, durations and places in words.

Each of the others answers one question:

======================  ================================================================================
``alone``               which ranks do alone what needs all ranks?
``caught_exceptions``   which exceptions did not end a rank, but may explain what it does?
``divergences``         which ranks called different collectives, according to the Flight Recorder?
``shifts``              which call has only some ranks made, so that all later ones are shifted?
``waits``               which ranks wait in different calls, according to their stacks alone?
``purpose``             what is a collective for: which part of the model, or which call of a library?
``user_lines``          which line of the user's code does a finding name, and what decided there?
``positions``           how far is each rank in its data, and which left a loop first?
``passes``              how many backward passes and optimizer steps has each rank made?
``file_locks``          who waits for a lock, and who holds it?
``silent_ranks``        what keeps a rank from answering, or how did it end?
``gloo_aborts``         which processes has gloo aborted, and by which call?
``exception_messages``  what does the message of an exception show?
``machine``             what delays a rank besides its code: memory, storage, cores, GPU?
``expected_waits``      does this wait usually take long, so that it is too early to report?
======================  ================================================================================
"""

from lightning_ncclsafe.facts.findings import Confidence as Confidence
from lightning_ncclsafe.facts.findings import Diagnosis as Diagnosis
from lightning_ncclsafe.facts.findings import Evidence as Evidence
from lightning_ncclsafe.facts.findings import Finding as Finding
from lightning_ncclsafe.facts.findings import Plan as Plan
from lightning_ncclsafe.facts.findings import Severity as Severity
from lightning_ncclsafe.rules.kit.activity import *
from lightning_ncclsafe.rules.kit.alone import *
from lightning_ncclsafe.rules.kit.caught_exceptions import *
from lightning_ncclsafe.rules.kit.data import *
from lightning_ncclsafe.rules.kit.divergences import *
from lightning_ncclsafe.rules.kit.exception_messages import *
from lightning_ncclsafe.rules.kit.expected_waits import *
from lightning_ncclsafe.rules.kit.file_locks import *
from lightning_ncclsafe.rules.kit.gloo_aborts import *
from lightning_ncclsafe.rules.kit.hosts import *
from lightning_ncclsafe.rules.kit.machine import *
from lightning_ncclsafe.rules.kit.passes import *
from lightning_ncclsafe.rules.kit.positions import *
from lightning_ncclsafe.rules.kit.purpose import *
from lightning_ncclsafe.rules.kit.registries import *
from lightning_ncclsafe.rules.kit.rule import *
from lightning_ncclsafe.rules.kit.sentences import *
from lightning_ncclsafe.rules.kit.shifts import *
from lightning_ncclsafe.rules.kit.silent_ranks import *
from lightning_ncclsafe.rules.kit.timeline import *
from lightning_ncclsafe.rules.kit.user_lines import *
from lightning_ncclsafe.rules.kit.waits import *
from lightning_ncclsafe.rules.kit.wording import *
