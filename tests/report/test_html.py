"""The page: the answer first, nothing left out that a sentence rests on, nothing loaded, nothing run."""

import base64
import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest
from diagnoses import diagnosis, with_first
from effort import calls_in
from incidents import (
    HOSTILE,
    STALL_S,
    all_different,
    data_incident,
    incident_of,
    job_of,
    poisoned,
    preflight_incident,
    recorded_incident,
)

from lightning_ncclsafe.facts import AwaitedThread, Collective, ExceptionFacts, Frame, IncidentKind
from lightning_ncclsafe.facts.findings import Diagnosis, Plan
from lightning_ncclsafe.report.html.page import render_html
from lightning_ncclsafe.report.text import render_text

VOID = frozenset({"meta", "br"})
OPTIONAL = frozenset({"li", "td", "th", "tr", "thead", "tbody"})


class Page(HTMLParser):
    """A page as a browser reads it: elements, what is linked to, and the words on it in their order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open[-1] != tag:
            assert self.open[-1] in OPTIONAL, f"<{self.open[-1]}> is open at </{tag}>"
            self.open.pop()
        self.open.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"] and data.strip():
            self.words.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def values(self, name: str) -> list[str]:
        return [str(attributes[name]) for _, attributes in self.elements if name in attributes]


def nothing_found() -> Diagnosis:
    return replace(diagnosis(), findings=())


def nobody_answered() -> Diagnosis:
    base = incident_of(2)
    return replace(base, job=replace(base.job, ranks=()), findings=(), unanswered=())


def raised() -> Diagnosis:
    base = incident_of(4)
    first, *others = base.job.ranks
    error = ExceptionFacts(type="ValueError", message="no such file", stack=first.stack[-3:])
    return replace(base, job=replace(base.job, ranks=(replace(first, exception=error), *others)))


MANY = "1,024 ranks"
INCIDENTS: dict[str, Callable[[], Diagnosis]] = {
    "2 ranks": lambda: incident_of(2),
    "9 ranks, one silent": lambda: incident_of(9, silent=(3,)),
    MANY: lambda: incident_of(1024),
    "12 different ranks": lambda: all_different(12),
    "a rank raised": raised,
    "data": lambda: data_incident(4),
    "data of many": lambda: data_incident(64),
    "recorded": lambda: recorded_incident(4),
    "preflight": lambda: preflight_incident(4),
    "nothing found": nothing_found,
    "nobody answered": nobody_answered,
    "hostile": lambda: poisoned(incident_of(4, silent=(3,))),
    "hostile data": lambda: poisoned(data_incident(2)),
    "hostile hosts": lambda: poisoned(preflight_incident(2)),
    "hostile exception": lambda: poisoned(raised()),
}


@cache
def incident(name: str) -> Diagnosis:
    return INCIDENTS[name]()


@cache
def html_of(name: str) -> str:
    """Those of many ranks take a while to make."""
    return render_html(incident(name))


@pytest.mark.parametrize("name", INCIDENTS)
def test_the_page_is_self_contained_without_scripts(name: str) -> None:
    html = html_of(name)
    page = Page(html)
    assert page.open == []
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "link", "base", "form", "image", "use"}
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert not page.values("src") and not page.values("style")
    assert not re.search(r"@import|url\(|https?:", html)
    policy = next(str(attributes["content"]) for tag, attributes in page.elements if "http-equiv" in attributes)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


@pytest.mark.parametrize("name", INCIDENTS)
def test_every_link_has_one_target_on_the_page(name: str) -> None:
    page = Page(html_of(name))
    places = page.values("id")
    assert len(places) == len(set(places))
    links = page.values("href")
    assert all(link.startswith("#") for link in links)
    assert {link[1:] for link in links} <= set(places)
    assert set(page.values("aria-labelledby")) <= set(places)


@pytest.mark.parametrize("name", [name for name in INCIDENTS if name.startswith("hostile")])
def test_text_from_facts_is_escaped(name: str) -> None:
    html = html_of(name)
    assert not [char for char in html if char != "\n" and (ord(char) < 32 or 127 <= ord(char) < 160)]
    assert not set("\u202e\u2066\u061c\u2028\ud800") & set(html)
    html.encode()
    text = Page(html).text
    assert "<script>pwned = 1</script>" in text and ']]>--><a href="javascript:pwned">&amp;' in text
    assert "\\x00\\x07\\x1b[2J" in text and "{{ 7 * 7 }}" in text


def test_the_answer_comes_first() -> None:
    text = Page(html_of(MANY)).text
    first = text[: text.index("Where ranks stand")]
    for part in (
        "rank-zero-only-work certain warning Who Rank 0 process 4000 on node-000 Where",
        "Where /home/me/project/model.py:93 in evaluate score = self.score(image)",
        "Why Rank 0 is working alone under",
        "What to do Share this work among all ranks",
        "Who waits Ranks 1-1023",
    ):
        assert part in first, part


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("/home/me/train.py:73 in evaluate", "/home/me/train.py:73 in evaluate"),
        (f"/{'a' * 40}/{'b' * 40}/train.py:73 in evaluate", f"…/{'b' * 40}/train.py:73 in evaluate"),
        (f"/home/me/{'a' * 80}.py:73 in evaluate", f"…/{'a' * 80}.py:73 in evaluate"),
        (f"{'a' * 80}.py:73 in evaluate", f"{'a' * 80}.py:73 in evaluate"),
    ],
    ids=["short", "long path", "long name", "no path"],
)
def test_the_first_screen_shows_the_end_of_a_long_path(location: str, shown: str) -> None:
    html = render_html(with_first(location=location))
    assert f'<code title="{location}">{shown}</code>' in html
    assert f"  where: {location}\n" in html  # to copy


def test_a_recorded_job_lists_what_was_read() -> None:
    text = Page(html_of("recorded")).text
    assert "What was read Read 4 of 4 ranks: dumps of ranks 0-3. Rank 0: the default group: called 345" in text
    assert "no progress" not in text[: text.index("Every fact")] and "Who waits" not in text


def test_waiting_ranks_are_described_if_the_answer_omits_them() -> None:
    base = incident_of(4)
    short = replace(base, findings=(replace(base.findings[0], summary="Rank 0 is late."),))
    assert (
        "Who waits Ranks 1-3 wait in DDP's gradient all-reduce (all_reduce, sequence" in Page(render_html(short)).text
    )


def test_code_in_sentences_is_marked_and_a_lone_backtick_is_not() -> None:
    assert "under <code>if rank == 0:</code> (line 3)" in render_html(
        with_first(summary="Alone under `if rank == 0:` (line 3)")
    )
    assert "a ` &lt;b&gt;" in render_html(with_first(summary="a ` <b>"))


def test_a_number_stays_with_its_unit_except_in_code_which_may_be_copied() -> None:
    shown = render_html(with_first(summary="Took 5 s in `timeout 7 s`"))
    assert "5\u00a0s in <code>timeout 7 s</code>" in shown


def test_what_decided_and_what_is_next_are_on_the_page_as_in_the_text() -> None:
    decided = "/home/me/train.py:70 in evaluate"
    told = with_first(decided_at=decided, plan=Plan.STOP)
    first = told.job.incident
    told = replace(told, job=replace(told.job, incident=replace(first, kind=IncidentKind.TIMEOUT)))
    text, page = render_text(told), Page(render_html(told)).text
    assert f"   Decided: {decided}\n" in text and f"Decided {decided}" in page
    words = "stop: the fault recurs until the code, its settings or its data change"
    assert f"Next: {words}." in text and f"Next {words}" in page
    without = Page(render_html(with_first(decided_at=told.findings[0].location))).text
    assert "Decided" not in without and "Next" not in without


def test_different_calls_under_one_number_are_all_in_the_table_of_groups() -> None:
    def text_of(changed: int) -> str:
        base = job_of(4)
        ranks = [
            replace(facts, collectives=tuple(map(changed_call, facts.collectives))) for facts in base.ranks[:changed]
        ]
        job = replace(base, ranks=(*ranks, *base.ranks[changed:]))
        return Page(render_html(replace(incident_of(4), job=job))).text

    def changed_call(call: Collective) -> Collective:
        return call if call.completed else replace(call, op="broadcast")

    assert "broadcast (25,557,032 elements of Float) on rank 1; all_reduce (25,557,032" in text_of(2)
    assert "346 all_reduce (25,557,032 elements of Float) 0 1-3" in text_of(0)


def test_every_observation_links_to_its_facts() -> None:
    html = html_of(MANY)
    for link, source in (
        ("rank-0-stack", "source code, rank 0"),
        ("rank-0-stack", "stack, rank 0"),
        ("rank-0-progress", "phase, rank 0"),
        ("groups", "flight recorder"),
    ):
        assert f'<a href="#{link}">{source}</a>' in html
    silent = render_html(incident_of(9, silent=(3,)))
    assert '<a href="#silent">process, rank 3</a>' in silent
    assert '<a href="#data-1">loader</a>' in render_html(data_incident(4))


def test_other_causes_and_unknowns_are_listed() -> None:
    base = incident_of(4)
    second = replace(base.findings[0], rule="slow-logger", remedy="Use another logger.")
    text = Page(render_html(replace(base, findings=(*base.findings, second)))).text
    assert "Also found slow-logger certain, rank 0" in text and "What to do. Use another logger." in text
    assert "What these facts cannot tell Gloo does not report" in text


def test_a_detailed_rank_has_all_its_facts() -> None:
    text = Page(render_html(incident_of(2))).text
    section = text[text.index("Every fact") :]
    for part in (
        "Rank 1 · node-000 · pid 4001",
        "idle 41 s",
        "global step 1234",
        "memory total 1.0 TB",
        "90008 sleeping 12 s",
        "346 all_reduce gloo no no",
        "ModelCheckpoint /scratch/run lustre",
        "nccl=2.28.9",
    ):
        assert part in section, part


def test_equal_ranks_share_their_details() -> None:
    html = html_of(MANY)
    assert html.count("<b>Ranks 1-1023</b>") == 1
    assert '<a href="#rank-1">like rank 1</a>' in html and 'id="rank-1023"' in html
    assert len(re.findall('<details class="box" id="rank-', html)) == 2


def test_common_frames_are_shown_once_and_library_frames_folded() -> None:
    html = render_html(incident_of(8))
    assert html.count("trainer.fit(model, data)") == 1
    assert "<summary>16 frames of lightning</summary>" in html
    assert html.index("<h3>Rank 0</h3>") < html.index("<h3>Ranks 1-7</h3>")


def test_a_traceback_is_shown() -> None:
    assert "Rank 0, where ValueError was raised" in Page(render_html(raised())).text


def test_stacks_seen_by_other_ranks_are_shown() -> None:
    base = incident_of(4, silent=(3,))
    seen = tuple(replace(process, stack=base.job.ranks[1].stack) for process in base.job.witnessed)
    late = replace(base, job=replace(base.job, witnessed=seen))
    assert "<h3>Rank 3, as seen from outside</h3>" in render_html(late)
    first, *others = incident_of(4).job.ranks
    workers = tuple(replace(worker, stack=first.stack[-1:]) for worker in first.workers)
    job = replace(base.job, ranks=(replace(first, stack=(), workers=workers), *others), witnessed=())
    html = render_html(replace(incident_of(4), job=job))
    assert html.count("<h3>4 workers of rank 0</h3>") == 1
    assert "score = self.score(image)" in html[: html.index("Where ranks stand")]


def test_the_stack_of_an_awaited_thread_is_shown() -> None:
    base = incident_of(4)
    awaited = AwaitedThread(name="writer", stack=(Frame(file="/train.py", line=7, function="put", code="send(part)"),))
    join = Frame(file="/usr/lib/python3.12/threading.py", line=1149, function="join")
    moved_on = tuple(replace(facts, awaited_thread=awaited) for facts in base.job.ranks)
    assert "The thread that" not in render_html(replace(base, job=replace(base.job, ranks=moved_on)))
    ranks = tuple(replace(facts, stack=(*facts.stack, join)) for facts in moved_on)
    html = render_html(replace(base, job=replace(base.job, ranks=ranks)))
    _, title, rest = html.partition("<h3>The thread that rank 0 waits for</h3>")
    assert title and "send(part)" in rest.partition("</div>")[0]


def test_hosts_are_shown_by_rank_or_as_a_range() -> None:
    few, many = Page(render_html(incident_of(2))).text, Page(render_html(incident_of(64))).text
    assert "rank 0 rank 1 rss 3.0 GB 3.0 GB" in few
    assert "load 1min 12.5 12.5 (rank 0) to 19.5 (rank 7)" in many


def test_data_and_preflight_are_tables() -> None:
    data, hosts = Page(render_html(data_incident(4))).text, Page(render_html(preflight_incident(4))).text
    assert "Data: train_dataloader rank host batches samples sampler differs 0, 2-3 node-000 1,250 40,000" in data
    assert "torch 2.13.0 (ranks 0, 2-3); 2.12.0 (rank 1)" in hosts
    assert "Where ranks stand" not in data and "Stacks" not in hosts


@pytest.mark.parametrize(
    ("name", "most_bytes"), [("2 ranks", 100_000), ("12 different ranks", 400_000), (MANY, 5_000_000)]
)
def test_the_page_stays_small(name: str, most_bytes: int) -> None:
    assert len(html_of(name).encode()) < most_bytes


@pytest.mark.parametrize("of", [incident_of, data_incident])
def test_the_effort_is_proportional_to_the_ranks(of: Callable[[int], Diagnosis]) -> None:
    few, many = of(64), of(256)
    render_html(few)  # Some is only done once in a process.
    assert calls_in(lambda: render_html(many)) < 4.5 * calls_in(lambda: render_html(few))


def test_rendering_has_a_time_limit() -> None:
    with pytest.raises(TimeoutError, match="took too long"):
        render_html(incident_of(2), most_s=0.0)
    assert render_html(incident_of(2), most_s=60.0) == render_html(incident_of(2))


def test_a_rank_without_times_is_still_drawn() -> None:
    base = job_of(3)
    ranks = tuple(replace(facts, taken_ns=0, collectives=()) for facts in base.ranks)
    html = render_html(replace(incident_of(3), job=replace(base, ranks=ranks)))
    assert f"no progress for {STALL_S:.0f} s" in html


def test_the_hostile_text_contains_markup() -> None:
    assert "</style>" in HOSTILE and "\x1b" in HOSTILE and "\u202e" in HOSTILE
