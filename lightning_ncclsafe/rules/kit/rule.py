"""What a rule is: its declaration, its place among the other rules, and the view of a job that it reads.

A rule is a function named after its cause that takes a view of a job and yields findings. Its decorator declares the
rest once: which rule it comes after, what to do, when it need not be asked, and which causes it merely follows from.
Order and precedence are computed from that.
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
    """A job as rules see it. Each answer is computed once and kept while the job is judged.

    Attributes:
        job: The job.
        answers: The answers so far, by function and arguments: see :func:`once`.
    """

    def __init__(self, job: JobFacts) -> None:
        self.job = job
        self.answers: dict[tuple[object, ...], Any] = {}


V = TypeVar("V", bound=View)


def once(ask: Callable[Concatenate[V, _P], _T]) -> Callable[Concatenate[V, _P], _T]:
    """Computes a function of a view once per job and keeps the result; its arguments have to be hashable."""

    def answer(view: V, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        key = (ask, *args, *kwargs.items())
        if key not in view.answers:
            view.answers[key] = ask(view, *args, **kwargs)
        known: _T = view.answers[key]
        return known

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
    """This kind of view of a job; consecutive calls for one job return the same object."""
    views = _views(_Same(job))
    if kind not in views:
        views[kind] = kind(job)
    view: V = views[kind]
    return view


@lru_cache(maxsize=1)
def _views(_: _Same) -> dict[type[View], Any]:
    return {}


def forget() -> None:
    """Drops the last job, so that its facts do not stay in memory while training continues."""
    _views.cache_clear()


@dataclass(frozen=True, slots=True)
class Findings:
    """What all rules have found in one job, for a rule that may be superseded by others."""

    every: Sequence[tuple["Rule[Any]", Finding]]

    def likely(self, names: Iterable[str]) -> list[Finding]:
        """The findings of these rules that are at least likely."""
        wanted = {*names}
        named = (finding for _, finding in self.every if finding.rule in wanted)
        return [finding for finding in named if finding.confidence is not Confidence.POSSIBLE]

    @property
    def of_exceptions(self) -> list[Finding]:
        """The findings of rules that read an exception's message."""
        return [finding for rule, finding in self.every if rule.reads_exceptions]


Superseded = Callable[[Finding, Findings], bool]
PlanFor = Callable[[V, Finding], Plan]
"""Chooses the plan for a finding where it depends on the facts; its docstring says on which, in one sentence."""


class Hangs(Enum):
    """Whether the job would hang if it started with this finding."""

    NO = "no"
    IF_UNEVEN = "when one rank's data ends first, which a vote on each batch prevents"
    LATER = "sooner or later, and no vote prevents it"
    AT_ONCE = "at the next collectives, which differ"


@dataclass(frozen=True, eq=False, repr=False)
class Rule(Generic[V]):
    """A rule and what it declares.

    Attributes:
        name: The name of the cause: ``"rank-zero-only-work"``.
        ask: The function.
        kind: The kind of view that it takes.
        remedy: What to do; empty if each finding has its own.
        after: The name of the rule that it comes after: among findings of equal confidence, the earlier rule is first.
        unless: Functions of the view; if one of them returns anything true, the rule finds nothing.
        follows: Names of causes that this one merely follows from: it is left out if one of them is at least likely.
        superseded: Whether its finding adds nothing to the findings of other rules.
        reads_exceptions: Whether it reads an exception's message, so that failed-rank need not report it again.
        is_of_machine: Whether it is about ranks that their machine delays, whatever line they are at.
        is_mutual: Whether it compares what ranks call, so that the ranks it does not name may be the diverging ones.
        is_of_data: Whether it is about which data ranks have, so that the line that makes the data is to be named.
        hangs: Whether a job that starts with it would hang; for rules that are asked before training.
        plan: What the next start should do about it: `stop` if only the code, its settings or its data can be wrong,
            `restart` if they cannot be.
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
    is_of_data: bool = False
    hangs: Hangs = Hangs.NO
    plan: Plan | PlanFor[V] = Plan.UNKNOWN

    def __repr__(self) -> str:
        return f"Rule({self.name!r})"

    def __call__(self, view: V) -> tuple[Finding, ...]:
        """Its findings; computed once per job."""
        return _findings(view, self)

    def findings(self, job: JobFacts) -> tuple[Finding, ...]:
        """Its findings about a job."""
        return self(view_of(self.kind, job))

    def is_superseded(self, finding: Finding, others: Findings) -> bool:
        """Whether its finding adds nothing to those of other rules."""
        if others.likely(self.follows):
            return True
        return self.superseded is not None and self.superseded(finding, others)

    def plan_for(self, view: V, finding: Finding) -> Plan:
        """What the next start should do about its finding."""
        return self.plan if isinstance(self.plan, Plan) else self.plan(view, finding)

    @cached_property
    def plan_words(self) -> str:
        """What the next start should do about it, and on what that depends."""
        if isinstance(self.plan, Plan):
            return self.plan.value
        return _first_sentence(self.plan)

    @cached_property
    def summary(self) -> str:
        """What it finds, in one sentence: the first one of its docstring."""
        return _first_sentence(self.ask)

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


def _first_sentence(function: Callable[..., object]) -> str:
    """The first sentence of a function's docstring, on one line."""
    return " ".join(cleandoc(function.__doc__ or "").split("\n\n")[0].split())


@once
def _findings(view: V, rule: Rule[V]) -> tuple[Finding, ...]:
    if any(excludes(view) for excludes in rule.unless):
        return ()
    named = (replace(one, rule=rule.name, remedy=one.remedy or rule.remedy) for one in rule.ask(view))
    return tuple(replace(one, plan=rule.plan_for(view, one)) for one in named)


def named_by(view: V, *rules: Rule[V], least: Confidence = Confidence.POSSIBLE) -> frozenset[int]:
    """The ranks that these rules name, in findings of at least this confidence."""
    enough = [*Confidence][: [*Confidence].index(least) + 1]
    findings = (finding for rule in rules for finding in rule(view))
    return frozenset(rank for finding in findings if finding.confidence in enough for rank in finding.ranks)


def at_most_likely(confidence: Confidence) -> Confidence:
    """The confidence in what is concluded from something observed with this confidence."""
    return Confidence.LIKELY if confidence is Confidence.CERTAIN else confidence


class Rules(Generic[V]):
    """The rules of one kind. Each is registered when its module is imported: there is no list to maintain.

    Args:
        kind: The kind of view that they take.
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
        is_of_data: bool = False,
        hangs: Hangs = Hangs.NO,
        plan: Plan | PlanFor[V] = Plan.UNKNOWN,
    ) -> Callable[[Callable[[V], Iterable[Finding]]], Rule[V]]:
        """Makes a rule of a function named after its cause; the arguments are attributes of :class:`Rule`.

        Raises:
            ValueError: If another module declares a rule of the same name.
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
                is_of_data=is_of_data,
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
        """Imports all modules of a package and returns the rules in order.

        Args:
            package: Name of the package.
            path: Its ``__path__``.
        """
        for module in iter_modules(path):
            import_module(f"{package}.{module.name}")
        return in_order(self._by_name.values())


def in_order(rules: Iterable[Rule[V]]) -> tuple[Rule[V], ...]:
    """The rules, each as close as possible behind the one that it comes after.

    Of several that come after the same rule, the one with the fewest successors is first, then the alphabet decides.

    Raises:
        ValueError: If a rule comes after one that does not exist, or after itself by way of others.
    """
    by_name = {rule.name: rule for rule in rules}
    successors: dict[str, list[str]] = {name: [] for name in ("", *by_name)}
    for rule in by_name.values():
        if rule.after not in successors:
            raise ValueError(f"the rule {rule.name} comes after {rule.after!r}, and there is no rule of that name")
        successors[rule.after].append(rule.name)
    ordered = [*_with_successors("", successors)][1:]
    if circle := sorted(by_name.keys() - {*ordered}):
        raise ValueError(f"these rules come after one another in a circle: {', '.join(circle)}")
    return tuple(by_name[name] for name in ordered)


def _with_successors(name: str, successors: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield name
    chains = (tuple(_with_successors(other, successors)) for other in successors[name])
    for chain in sorted(chains, key=lambda chain: (len(chain), chain)):
        yield from chain
