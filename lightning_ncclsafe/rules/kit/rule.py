"""What a rule is: its declaration, its place among the others, and the view of a job that it is asked about.

A rule is a function named after its cause that takes a view of a job and yields findings. What it has to say about
itself stands in its decorator, once: what it comes after, what to do, what makes it needless, and of what it is a mere
consequence. Order and precedence are computed from that.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache, update_wrapper
from importlib import import_module
from inspect import cleandoc
from pkgutil import iter_modules
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.findings import Confidence, Finding, Plan

SECTIONS = ("Symptom", "Cause", "Remedy", "Cannot see")
"""What every rule's docstring has, after its first sentence."""

_T = TypeVar("_T")
_P = ParamSpec("_P")


class View:
    """What rules ask about one job: answers are worked out once and kept for as long as the job is judged.

    Attributes:
        job: The job.
        answers: What has been asked so far, by the question and its arguments: see :func:`once`.
    """

    def __init__(self, job: JobFacts) -> None:
        self.job = job
        self.answers: dict[tuple[object, ...], Any] = {}


V = TypeVar("V", bound=View)


def once(ask: Callable[Concatenate[V, _P], _T]) -> Callable[Concatenate[V, _P], _T]:
    """A question that is answered once for each job, whoever asks it again; its arguments have to be hashable."""

    def answer(view: V, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        key = (ask, *args, *kwargs.items())
        if key not in view.answers:
            view.answers[key] = ask(view, *args, **kwargs)
        found: _T = view.answers[key]
        return found

    update_wrapper(answer, ask)
    return answer


class _Same:
    """Compares jobs by identity: facts hold dictionaries and cannot be hashed."""

    def __init__(self, job: JobFacts) -> None:
        self.job = job

    def __hash__(self) -> int:
        return id(self.job)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.job is self.job


def view_of(kind: type[V], job: JobFacts) -> V:
    """The view of this kind of a job; consecutive calls for one job give the same object."""
    views = _views(_Same(job))
    if kind not in views:
        views[kind] = kind(job)
    found: V = views[kind]
    return found


@lru_cache(maxsize=1)
def _views(same: _Same) -> dict[type[View], Any]:
    return {}


def forget() -> None:
    """Lets the last job go, so that its facts do not stay in memory while training goes on."""
    _views.cache_clear()


@dataclass(frozen=True, slots=True)
class Findings:
    """What all rules have found in one job, for one that asks whether it has still anything to say."""

    every: Sequence[tuple["Rule[Any]", Finding]]

    def likely(self, names: Iterable[str]) -> list[Finding]:
        """Findings of these names that are at least likely."""
        wanted = {*names}
        found = (finding for _, finding in self.every if finding.rule in wanted)
        return [finding for finding in found if finding.confidence is not Confidence.POSSIBLE]

    @property
    def of_exceptions(self) -> list[Finding]:
        """Findings of rules that read what an exception says."""
        return [finding for rule, finding in self.every if rule.reads_exceptions]


Superseded = Callable[[Finding, Findings], bool]
PlanFor = Callable[[V, Finding], Plan]
"""What follows from a finding where that depends on what was seen; its docstring says on what, in one sentence."""


class Hangs(Enum):
    """Whether ranks that start all the same would wait for one another for ever."""

    NO = "no"
    IF_UNEVEN = "where one rank's data end first, which a vote on each batch prevents"
    LATER = "sooner or later, and no vote prevents it"
    AT_ONCE = "with their next collectives, which differ"


@dataclass(frozen=True, eq=False, repr=False)
class Rule(Generic[V]):
    """A rule and what it declares.

    Attributes:
        name: The name of the cause: ``"rank-zero-only-work"``.
        ask: The function.
        kind: The view that it asks.
        remedy: What to do; empty where each finding has its own.
        after: The name of the rule behind which it stands: between findings of equal confidence the earlier rule comes
            first.
        unless: Questions; where one of them is answered by anything but nothing, the rule has nothing to say.
        follows: Names of causes of which this one is a mere consequence: it is left out where one is at least likely.
        superseded: Whether a finding of it is no news beside those of others.
        reads_exceptions: Whether it reads what an exception says, so that this need not be told again.
        is_of_machine: Whether it is about ranks that their machine holds up, whatever line they have come to.
        is_mutual: Whether it compares what ranks call, so that those it does not name may be the ones that diverged.
        hangs: Whether ranks that start with it would hang, where it is asked before they train.
        plan: What the next start is to do about it: `stop` where only the code, its settings or its data can be wrong,
            `restart` where they cannot be.
    """

    name: str
    ask: Callable[[V], Iterable[Finding]]
    kind: type[V]
    remedy: str = ""
    after: str = ""
    unless: tuple[Callable[[V], object], ...] = ()
    follows: tuple[str, ...] = ()
    superseded: Superseded | None = None
    reads_exceptions: bool = False
    is_of_machine: bool = False
    is_mutual: bool = False
    hangs: Hangs = Hangs.NO
    plan: Plan | PlanFor[V] = Plan.UNKNOWN

    def __repr__(self) -> str:
        return f"Rule({self.name!r})"

    def __call__(self, view: V) -> tuple[Finding, ...]:
        """What it finds in a job; worked out once."""
        return _found(view, self)

    def findings(self, job: JobFacts) -> tuple[Finding, ...]:
        """What it finds in a job."""
        return self(view_of(self.kind, job))

    def is_superseded(self, finding: Finding, others: Findings) -> bool:
        """Whether a finding of its own is no news beside those of others."""
        if others.likely(self.follows):
            return True
        return self.superseded is not None and self.superseded(finding, others)

    def plan_for(self, view: V, finding: Finding) -> Plan:
        """What the next start is to do about a finding of its own."""
        return self.plan if isinstance(self.plan, Plan) else self.plan(view, finding)

    @cached_property
    def plan_words(self) -> str:
        """What the next start is to do about it, and on what that depends."""
        if isinstance(self.plan, Plan):
            return self.plan.value
        return " ".join(cleandoc(self.plan.__doc__ or "").split("\n\n")[0].split())

    @cached_property
    def summary(self) -> str:
        """What it finds, in one sentence: the first one of its docstring."""
        return " ".join(cleandoc(self.ask.__doc__ or "").split("\n\n")[0].split())

    @cached_property
    def sections(self) -> Mapping[str, str]:
        """The sections of its docstring, each as one paragraph."""
        parts: dict[str, list[str]] = {}
        for paragraph in cleandoc(self.ask.__doc__ or "").split("\n\n")[1:]:
            title, colon, text = paragraph.partition(":\n")
            if colon and title in SECTIONS:
                parts[title] = [text]
            elif parts:
                # A section of more than one paragraph.
                parts[next(reversed(parts))].append(paragraph)
        return {title: " ".join(" ".join(texts).split()) for title, texts in parts.items()}


@once
def _found(view: V, rule: Rule[V]) -> tuple[Finding, ...]:
    if any(question(view) for question in rule.unless):
        return ()
    found = rule.ask(view)
    named = (replace(one, rule=rule.name, remedy=one.remedy or rule.remedy) for one in found)
    return tuple(replace(one, plan=rule.plan_for(view, one)) for one in named)


def named_by(view: V, *rules: Rule[V], least: Confidence = Confidence.POSSIBLE) -> frozenset[int]:
    """The ranks that these rules name, by findings that are at least so sure."""
    enough = [*Confidence][: [*Confidence].index(least) + 1]
    found = (finding for rule in rules for finding in rule(view))
    return frozenset(rank for finding in found if finding.confidence in enough for rank in finding.ranks)


class Rules(Generic[V]):
    """Rules of one kind, which take their places as their modules are imported: there is no list to be kept.

    Args:
        kind: The view that they ask.
    """

    def __init__(self, kind: type[V]) -> None:
        self._kind = kind
        self._by_name: dict[str, Rule[V]] = {}

    def rule(
        self,
        *,
        after: str = "",
        remedy: str = "",
        unless: tuple[Callable[[V], object], ...] = (),
        follows: tuple[str, ...] = (),
        superseded: Superseded | None = None,
        reads_exceptions: bool = False,
        is_of_machine: bool = False,
        is_mutual: bool = False,
        hangs: Hangs = Hangs.NO,
        plan: Plan | PlanFor[V] = Plan.UNKNOWN,
    ) -> Callable[[Callable[[V], Iterable[Finding]]], Rule[V]]:
        """Makes a rule of a function, which is named after its cause; the arguments are attributes of :class:`Rule`.

        Raises:
            ValueError: If another module declares a rule of that name.
        """

        def register(ask: Callable[[V], Iterable[Finding]]) -> Rule[V]:
            rule = Rule(
                name=ask.__name__.replace("_", "-"),
                ask=ask,
                kind=self._kind,
                remedy=remedy,
                after=after,
                unless=unless,
                follows=follows,
                superseded=superseded,
                reads_exceptions=reads_exceptions,
                is_of_machine=is_of_machine,
                is_mutual=is_mutual,
                hangs=hangs,
                plan=plan,
            )
            known = self._by_name.setdefault(rule.name, rule)
            if known.ask.__module__ != ask.__module__:
                raise ValueError(f"the rule {rule.name} is declared in {known.ask.__module__} and in {ask.__module__}")
            self._by_name[rule.name] = rule
            return rule

        return register

    def __getitem__(self, name: str) -> Rule[V]:
        return self._by_name[name]

    def __iter__(self) -> Iterator[Rule[V]]:
        return iter([*self._by_name.values()])

    def of(self, package: str, path: Iterable[str]) -> tuple[Rule[V], ...]:
        """Imports all modules of a package, and gives the rules in their order.

        Args:
            package: Name of the package.
            path: Its ``__path__``.
        """
        for module in iter_modules(path):
            import_module(f"{package}.{module.name}")
        return in_order(self._by_name.values())


def in_order(rules: Iterable[Rule[V]]) -> tuple[Rule[V], ...]:
    """Rules so that each stands behind the one that it comes after, as closely as others allow.

    Of several that come after one, those of which fewer come after in turn stand first, then the alphabet decides.

    Raises:
        ValueError: If a rule comes after one that there is not, or after itself by way of others.
    """
    by_name = {rule.name: rule for rule in rules}
    behind: dict[str, list[str]] = {name: [] for name in ("", *by_name)}
    for rule in by_name.values():
        if rule.after not in behind:
            raise ValueError(f"the rule {rule.name} comes after {rule.after!r}, and there is no rule of that name")
        behind[rule.after].append(rule.name)
    placed = [*_placed("", behind)][1:]
    if circle := sorted(by_name.keys() - {*placed}):
        raise ValueError(f"these rules come after one another in a circle: {', '.join(circle)}")
    return tuple(by_name[name] for name in placed)


def _placed(name: str, behind: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield name
    parts = sorted((tuple(_placed(other, behind)) for other in behind[name]), key=lambda part: (len(part), part))
    for part in parts:
        yield from part
