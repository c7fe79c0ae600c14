"""The page in a real browser: it fits a phone, a desktop and paper, complains of nothing, runs and loads nothing.

Without a browser these tests are skipped; with NCCLSAFE_BROWSER_TESTS=required, as in CI, they fail.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from chromium import Browser, Page, found
from incidents import data_incident, incident_of, poisoned, preflight_incident, recorded_incident

from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.report.html.page import render_html

IS_REQUIRED = os.environ.get("NCCLSAFE_BROWSER_TESTS") == "required"
pytestmark = pytest.mark.skipif(
    not found() and not IS_REQUIRED, reason="there is no chromium or chrome on this machine"
)

PHONE, DESKTOP = 390, 1280
HEIGHTS = {PHONE: 844, DESKTOP: 800}

FOLDER = "/gpfs/projects/vision-language/users/a.longname/checkouts/2026-11-21-retraining/src/retrieval/training/loops"
SUMMARY = (
    "Ranks have made different numbers of backward passes in batch 31,118 of epoch 12 (1 on ranks 1-2, 4, 6, 8, "
    "10, 12, 14, 16, 18, 20, 22, 24, … (262 ranks), 2 on rank 0), so that since then the gradients of different "
    "passes have been reduced together; rank 0 is now at distributed_c10d.py:5300 in barrier, in validation, for "
    "23 s, while ranks 1-511 wait in DDP's gradient all-reduce of its only bucket (head, branch, trunk, 102.2 "
    "kB), in backward (all_reduce)."
)
REMEDY = (
    "Let every rank make the same passes: where the loss of a rank is left out, multiply it by zero instead, and "
    "where a batch is skipped, skip it on all ranks. Try NCCL_P2P_DISABLE=1: if it trains then, these GPUs cannot "
    "reach each other's memory, often because the IOMMU or ACS is on in the BIOS or in a virtual machine; nvidia- "
    "smi topo -p2p r shows which, and NCCL_DEBUG=INFO what NCCL has chosen. A longer timeout only waits longer."
)


def longest() -> Diagnosis:
    """A job of 512 ranks, in which the sentences and paths are as long as any that rules and users have made."""
    base = incident_of(512, silent=tuple(range(3, 500, 2)))
    last = base.findings[-1]
    long = replace(
        last,
        ranks=tuple(range(0, 512, 3)),
        summary=SUMMARY,
        remedy=REMEDY,
        location=f"{FOLDER}/contrastive_with_hard_negatives.py:1093 in validation_epoch_end_on_every_rank",
    )
    job = replace(base.job, launch="SLURM job 4711, kubeflow job retrieval-training-worker")
    return replace(base, job=job, findings=(long, *base.findings))


MADE = {
    "2 ranks": lambda: incident_of(2),
    "a silent rank": lambda: incident_of(9, silent=(3,)),
    "1,024 ranks": lambda: incident_of(1024),
    "the longest": longest,
    "data": lambda: data_incident(4),
    "recorded": lambda: recorded_incident(4),
    "preflight": lambda: preflight_incident(4),
    "hostile": lambda: poisoned(incident_of(4, silent=(3,))),
}

Open = Callable[..., AbstractContextManager[Page]]


@cache
def html_of(name: str) -> str:
    return render_html(MADE[name]())


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert found(), "NCCLSAFE_BROWSER_TESTS=required, and there is no chromium or chrome on this machine"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(found(), Path(profile))
        yield browser
        browser.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Open:
    def opened(name: str, width: int, *, dark: bool = False) -> AbstractContextManager[Page]:
        path = tmp_path / "report.html"
        path.write_text(html_of(name), encoding="utf-8")
        return browser.page(path, width, HEIGHTS.get(width, 844), dark=dark)

    return opened


# Elements that stick out of the window, unless they are in a box that scrolls by itself.
TOO_WIDE = """[...document.body.querySelectorAll('*')]
    .filter(one => !one.closest('.scroll, svg') && one.checkVisibility()
            && (one.getBoundingClientRect().right > innerWidth + 0.5 || one.getBoundingClientRect().left < -0.5))
    .map(one => one.outerHTML.slice(0, 200))"""


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("name", MADE)
def test_the_page_fits_and_requests_nothing_else(show: Open, name: str, width: int) -> None:
    with show(name, width) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(TOO_WIDE) == []
        assert [url.rpartition("/")[2] for url in page.requests()] == ["report.html"]
        assert page.complaints() == []


# Where the answers to who, where, why and what to do are, and by how much each is cut off.
ANSWERS = """Object.fromEntries(['who', 'where', 'why', 'what-to-do'].map(id => {
    const one = document.getElementById(id), {left, top, right, bottom, height} = one.getBoundingClientRect();
    const cut = [...one.querySelectorAll('.long')].map(part => part.scrollHeight - part.clientHeight);
    return [id, {left, top, right, bottom, height, cut: Math.max(0, ...cut)}];
}))"""


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("name", ["2 ranks", "1,024 ranks", "the longest"])
def test_the_first_screen_shows_who_where_why_and_what_to_do(show: Open, name: str, width: int) -> None:
    with show(name, width) as page:
        boxes = page.evaluate(ANSWERS)
    assert [*boxes] == ["who", "where", "why", "what-to-do"]
    for box in boxes.values():
        assert 0 <= box["left"] < box["right"] <= width
        assert 0 <= box["top"] < box["bottom"] <= HEIGHTS[width], boxes
        assert box["height"] >= 15 and box["cut"] <= 1, boxes


def test_an_overlong_answer_stays_on_the_first_screen(show: Open, browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    base = longest()
    first = replace(base.findings[0], summary=SUMMARY * 4, remedy=REMEDY * 4)
    path.write_text(render_html(replace(base, findings=(first,))), encoding="utf-8")
    with browser.page(path, PHONE, HEIGHTS[PHONE]) as page:
        boxes = page.evaluate(ANSWERS)
        text = page.evaluate("document.querySelector('.copy pre').textContent")
    assert max(box["bottom"] for box in boxes.values()) <= HEIGHTS[PHONE]
    assert boxes["why"]["cut"] > 100 and SUMMARY * 4 in text and REMEDY * 4 in text


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_a_click_selects_the_whole_answer(show: Open, width: int) -> None:
    with show("the longest", width) as page:
        assert page.evaluate("document.querySelector('summary').innerText") == "The answer as text, to copy"
        page.click("summary")
        page.click(".copy pre")
        selected = page.evaluate("getSelection().toString()")
        assert selected.strip() == page.evaluate("document.querySelector('.copy pre').textContent").strip()
    first, *others = selected.strip().splitlines()
    assert first == f"rank-zero-only-work: {SUMMARY}"
    assert f"  remedy: {REMEDY}" in others and f"  where: {FOLDER}/contrastive_with" in "\n".join(others)
    assert others[-1].startswith("Incident 1: rank 1 made no progress for 41 s. 263 of 512 ranks answered.")


def test_hundreds_of_identical_ranks_share_one_finding(show: Open) -> None:
    with show("the longest", DESKTOP) as page:
        others = page.evaluate(
            "[...document.querySelectorAll('section[aria-labelledby=others] details')].map(one => one.textContent)"
        )
        assert page.evaluate("document.body.textContent").count("is stopped by a signal (SIGSTOP), while") == 1
    assert len(others) == 2
    assert "The same was found for ranks 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, … (248 ranks)" in others[0]


def test_facts_run_no_code(show: Open) -> None:
    with show("hostile", PHONE) as page:
        assert page.evaluate("typeof pwned") == "undefined"
        assert page.evaluate("document.querySelectorAll('script, img, a[href^=javascript]').length") == 0
        assert "<script>pwned = 1</script>" in page.evaluate("document.body.innerText")


def test_the_policy_blocks_injected_content(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    slipped = "<script>pwned = 1</script><img src='http://127.0.0.1:9/x' onerror='pwned = 1'><p style='color: red'>"
    path.write_text(html_of("2 ranks").replace("<main>", f"<main>{slipped}"))
    with browser.page(path, PHONE) as page:
        assert page.evaluate("typeof pwned") == "undefined"
        assert page.evaluate("getComputedStyle(document.querySelector('p[style]')).color") != "rgb(255, 0, 0)"
        assert len([text for text in page.complaints() if "Content Security Policy" in text]) >= 3


def test_the_policy_allows_the_pages_own_style(show: Open) -> None:
    with show("2 ranks", DESKTOP) as page:
        assert page.evaluate("getComputedStyle(document.querySelector('.lanes')).listStyleType") == "none"


def test_a_link_unfolds_its_target(show: Open) -> None:
    with show("2 ranks", PHONE) as page:
        assert page.evaluate("document.querySelector('#rank-0').open") is False
        click = "document.querySelector('a[href=\"#rank-0-progress\"]').click()"
        # Only when that is told has the page gone there.
        page.evaluate(f"new Promise(done => {{ addEventListener('hashchange', () => done(0)); {click} }})")
        assert page.evaluate("document.querySelector('#rank-0').open") is True
        top = page.evaluate("document.querySelector('#rank-0-progress').getBoundingClientRect().top")
        assert -1 < top < 844


def test_print_shows_everything_unfolded(show: Open) -> None:
    folded = "[...document.querySelectorAll('details > :not(summary)')].filter(one => !one.checkVisibility()).length"
    with show("2 ranks", 680) as page:
        assert page.evaluate(folded.replace("checkVisibility()", "checkVisibility({contentVisibilityAuto: true})")) > 0
        page.emulate("print")
        assert (
            page.evaluate("[...document.querySelectorAll('details tr')].filter(one => !one.offsetHeight).length") == 0
        )
        assert page.evaluate("document.documentElement.scrollWidth") == 680
        wide = "[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth + 1).length"
        assert page.evaluate(wide) == 0
        # So many pages are not filled by what is shown before anything is opened.
        assert len(re.findall(rb"/Type\s*/Page\b", page.pdf())) >= 5


# The least contrast of any text with what is behind it, as WCAG 2 defines it.
LEAST_CONTRAST = """(() => {
    const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
    const rgba = colour => {
        canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        return canvas.getImageData(0, 0, 1, 1).data;
    };
    const light = ([r, g, b]) => [[r, 0.2126], [g, 0.7152], [b, 0.0722]].reduce((sum, [value, share]) => {
        const part = value / 255;
        return sum + share * (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    }, 0);
    const behind = one => {
        for (; one; one = one.parentElement) {
            const colour = rgba(getComputedStyle(one).backgroundColor);
            if (colour[3] == 255) return colour;
        }
    };
    const texts = [...document.body.querySelectorAll('*')].filter(one => !one.closest('svg') && one.checkVisibility()
        && [...one.childNodes].some(node => node.nodeType == 3 && node.data.trim()));
    const contrasts = texts.map(one => {
        const [a, b] = [light(rgba(getComputedStyle(one).color)), light(behind(one))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
    });
    return Math.min(...contrasts);
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["a silent rank", "the longest"])
def test_all_text_has_enough_contrast(show: Open, name: str, dark: bool) -> None:
    with show(name, DESKTOP, dark=dark) as page:
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(22, 21, 19)" if dark else "rgb(252, 251, 248)"
        )
        assert page.evaluate(LEAST_CONTRAST) >= 4.5


def test_the_picture_has_text_labels(show: Open) -> None:
    with show("1,024 ranks", PHONE) as page:
        labels = page.evaluate(
            "[...document.querySelectorAll('.lanes svg')].map(one => one.getAttribute('aria-label'))"
        )
        assert len(labels) == 2 and all("no progress for 41 s" in label for label in labels)
        late = "document.querySelector('.lanes .odd .bar-works').getBoundingClientRect().width"
        assert page.evaluate(late) > PHONE / 2
        assert page.evaluate("document.querySelectorAll('.lanes li:last-child .call').length") > 20


def test_heading_levels_are_not_skipped(show: Open) -> None:
    with show("1,024 ranks", DESKTOP) as page:
        levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map(one => +one.tagName[1])")
    assert levels.count(1) == 1 and levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
