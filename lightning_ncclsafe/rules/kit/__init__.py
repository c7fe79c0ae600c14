"""What rules share, all importable from here: how a rule is declared, what it asks about a job, and how it words it.

``rule`` declares rules, and ``parts`` says which ranks deviate. Rules read a view: ``timeline`` of a job that waits,
``data`` before a stage, ``hosts`` before training. In a stack, ``frames`` finds the user's lines, and ``landmarks`` the
known code around and below them. Of a job that waits, ``activity`` answers what a rank does and waits for, ``purpose``
what a collective is for, ``positions`` how far ranks are in their data, ``user_lines`` which line of the user's code
decides. Four modules compare what ranks call: ``divergences`` by the recorder, ``waits`` by stacks, ``shifts`` by calls
that only some have made, ``passes`` by backward passes. The others are about one kind of evidence each. ``sentences``
builds findings, with the words of ``facts.wording``.
"""

from lightning_ncclsafe.facts.findings import Confidence as Confidence
from lightning_ncclsafe.facts.findings import Diagnosis as Diagnosis
from lightning_ncclsafe.facts.findings import Evidence as Evidence
from lightning_ncclsafe.facts.findings import Finding as Finding
from lightning_ncclsafe.facts.findings import Plan as Plan
from lightning_ncclsafe.facts.findings import Severity as Severity
from lightning_ncclsafe.facts.wording import *
from lightning_ncclsafe.rules.kit.activity import *
from lightning_ncclsafe.rules.kit.alone import *
from lightning_ncclsafe.rules.kit.caught_exceptions import *
from lightning_ncclsafe.rules.kit.data import *
from lightning_ncclsafe.rules.kit.divergences import *
from lightning_ncclsafe.rules.kit.exception_messages import *
from lightning_ncclsafe.rules.kit.exit_calls import *
from lightning_ncclsafe.rules.kit.file_locks import *
from lightning_ncclsafe.rules.kit.frames import *
from lightning_ncclsafe.rules.kit.gloo_aborts import *
from lightning_ncclsafe.rules.kit.hosts import *
from lightning_ncclsafe.rules.kit.landmarks import *
from lightning_ncclsafe.rules.kit.machine import *
from lightning_ncclsafe.rules.kit.own_timeouts import *
from lightning_ncclsafe.rules.kit.parts import *
from lightning_ncclsafe.rules.kit.passes import *
from lightning_ncclsafe.rules.kit.polling import *
from lightning_ncclsafe.rules.kit.positions import *
from lightning_ncclsafe.rules.kit.purpose import *
from lightning_ncclsafe.rules.kit.rule import *
from lightning_ncclsafe.rules.kit.sentences import *
from lightning_ncclsafe.rules.kit.shifts import *
from lightning_ncclsafe.rules.kit.silent_ranks import *
from lightning_ncclsafe.rules.kit.timeline import *
from lightning_ncclsafe.rules.kit.user_lines import *
from lightning_ncclsafe.rules.kit.wait_circles import *
from lightning_ncclsafe.rules.kit.waits import *
