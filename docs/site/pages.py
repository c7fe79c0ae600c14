"""Makes the pages of causes from the rules themselves, so that adding a cause adds its page.

MkDocs calls the functions whose names begin with ``on_``. Each cause gets a page made of its rule's docstring and of a
report: recorded facts (``docs/site/reports``, written by ``docs/site/record.py``), judged by today's rules. The build
fails where a rule has no such section or no such facts, or where today's rules name something else first.
"""

import io
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from lightning_ncclsafe.cli import main
from lightning_ncclsafe.cli.explain import RULES
from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.codec import from_plain
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.report.html.page import render_html
from lightning_ncclsafe.report.text import render_text
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.rule import SECTIONS, Rule

DOCS = Path(__file__).resolve().parents[1]
REPORTS = DOCS / "site" / "reports"
TITLES: dict[str, str] = yaml.safe_load((DOCS / "site" / "titles.yml").read_text())
CAUSES = "Causes"
"""The entry of the navigation that the pages of causes are put under."""
# Sphinx's roles, which docstrings use for the names of classes.
ROLE = re.compile(r":(?:class|func|meth|mod|attr):<code>~?\.?([\w.]+)</code>")
RECORDED = "What recordings show"
PLANS = "<!-- plans -->"
HELP = re.compile(r"^<!-- help: (.+) -->$", re.MULTILINE)
# What the text of a report ends with, which only the whole report shows.
STACKS = re.compile(r"\n\n(?=Stacks? of .*\n---)")
ERRORS_FIRST = 3
# The part of a title that a page of search results shows.
LONGEST_TITLE = 90


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A rule as a page shows it."""

    name: str
    kind: str
    summary: str
    sections: dict[str, str]
    diagnosis: Diagnosis
    made: str

    @property
    def title(self) -> str:
        """What users see of the cause, which is what they search for."""
        return TITLES.get(self.name) or title_of(self.sections["Symptom"])


def title_of(symptom: str) -> str:
    """The beginning of a symptom, cut where a clause ends."""
    sentence = re.split(r"(?<=\w[.;:])\s|(?<=\"[.;:])\s|(?<=\)[.;:])\s", symptom, maxsplit=1)[0].rstrip(".;:")
    while len(sentence) > LONGEST_TITLE and ", " in sentence:
        sentence = sentence.rpartition(", ")[0]
    return sentence.replace("``", "`")


def slug(kind: str) -> str:
    """The folder with the facts of such causes."""
    return kind.lower().replace(" ", "-")


def facts_file(kind: str, name: str) -> Path:
    """The facts whose report the page of a cause shows."""
    return REPORTS / slug(kind) / f"{name}.json"


def load(kind: str, rule: Rule[Any]) -> Cause:
    """A rule with its report.

    Raises:
        PluginError: A part of it is missing; the message gives the command that makes it.
    """
    name, sections = rule.name, dict(rule.sections)
    if absent := [section for section in SECTIONS if not sections.get(section)]:
        raise PluginError(f"The docstring of the rule {name} has no section {', '.join(absent)}.")
    path = facts_file(kind, name)
    if not path.exists():
        raise PluginError(
            f"{name} ({kind}) has no report to show: run `python docs/site/record.py {name}`, which writes"
            f" {path.relative_to(DOCS.parent)}."
        )
    recorded = json.loads(path.read_text())
    diagnosis = judge(_facts(recorded), RULES[kind])
    named = [finding.rule for finding in diagnosis.findings]
    if name not in named[:1]:
        raise PluginError(
            f"For the facts in {path.relative_to(DOCS.parent)}, today's rules name {', '.join(named) or 'nothing'}, and"
            f" not {name} first: fix the rule, or run `python docs/site/record.py {name}`."
        )
    made = recorded["made"]
    return Cause(name=name, kind=kind, summary=rule.summary, sections=sections, diagnosis=diagnosis, made=made)


def _facts(recorded: dict[str, Any]) -> JobFacts:
    """What was recorded, or what logs and dumps of the tests show."""
    if "job" in recorded:
        return from_plain(JobFacts, recorded["job"])
    evidence = Artifacts()
    for path in recorded["files"]:
        evidence.read(str(DOCS.parent / path))
    job = evidence.job()
    if job is None:
        raise PluginError(f"There is nothing to judge in {', '.join(recorded['files'])}.")
    return job


def causes() -> dict[str, list[Cause]]:
    """All causes by name; some names have two rules, one for live jobs and one for what a run has left."""
    found: dict[str, list[Cause]] = defaultdict(list)
    for kind, rules in RULES.items():
        for rule in dict.fromkeys(rules):
            found[rule.name].append(load(kind, rule))
    if unknown := TITLES.keys() - found.keys():
        raise PluginError(
            f"docs/site/titles.yml has titles of causes that no rule names: {', '.join(sorted(unknown))}."
        )
    titles = Counter(told[0].title for told in found.values())
    for name, told in found.items():
        if titles[told[0].title] > 1:
            raise PluginError(f"Another cause has the title of {name}: give it one in docs/site/titles.yml.")
    return dict(found)


def on_config(config: MkDocsConfig) -> None:
    """Puts all causes into the navigation, by what they are about."""
    listed = next(entry for entry in config.nav or () if CAUSES in entry)[CAUSES]
    seen: set[str] = set()
    for kind, rules in RULES.items():
        names = [name for rule in rules if (name := rule.name) not in seen]
        pages = [{name: f"causes/{name}.md"} for name in sorted(set(names))]
        seen.update(names)
        listed.append({kind: pages})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of all causes, their reports, and the list of them."""
    leading = error_texts()
    found = causes()
    for name, told in found.items():
        page = _page(name, told, leading.get(name, []), found.keys())
        files.append(File.generated(config, f"causes/{name}.md", content=page))
        for number, one in enumerate(told):
            report = File.generated(config, f"causes/{_report(name, number)}", content=render_html(one.diagnosis))
            files.append(report)
    files.append(File.generated(config, "causes/index.md", content=_list(found)))
    return files


def error_texts() -> dict[str, list[tuple[str, str]]]:
    """By cause: title and file of the pages on error texts that lead to it."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in sorted((DOCS / "hangs").glob("*.md")):
        text = path.read_text()
        title = next(line for line in text.splitlines() if line.startswith("# ")).removeprefix("# ")
        if path.stem != "index":
            for name in dict.fromkeys(re.findall(r"\(\.\./causes/([\w-]+)\.md\)", text)):
                found[name].append((title, path.name))
    return found


def _report(name: str, number: int) -> str:
    return f"report-{name}{f'-{number + 1}' if number else ''}.html"


def _page(name: str, told: list[Cause], leading: list[tuple[str, str]], names: Collection[str]) -> str:
    other = "|".join(sorted(set(names) - {name}, key=len, reverse=True))
    linked = partial(re.sub, rf"(?<![\w`-])({other})(?![\w-])", r"[`\1`](\1.md)")
    return "\n".join(_lines(name, told, leading, linked)) + "\n"


def _lines(name: str, told: list[Cause], leading: list[tuple[str, str]], linked: Callable[[str], str]) -> Iterator[str]:
    first = told[0]
    yield from ("---", f"title: {name}", f"description: {json.dumps(first.summary)}", "hide: [toc]", "---", "")
    yield from (f"# {first.title}", "")
    yield from (f"Reports call this **`{name}`**: {lowered(first.summary)}", "")
    if leading:
        links = ", ".join(f"[{title}](../hangs/{file})" for title, file in leading)
        yield from (f"Error messages that lead here: {links}.", "")
    for number, one in enumerate(told):
        yield from _told(one, number, linked, alone=len(told) == 1)


def _told(one: Cause, number: int, linked: Callable[[str], str], *, alone: bool) -> Iterator[str]:
    level = "##" if alone else "###"
    if not alone:
        yield from (f"## {one.kind}", "")
        if number:
            yield from (one.summary, "")
    titles = {"Symptom": "What you see", "Cause": "Why", "Remedy": "What to do", "Cannot see": "What it cannot see"}
    for section, title in titles.items():
        yield from (f"{level} {title}", "", linked(one.sections[section].replace("``", "`")), "")
    # Its words occur in all reports, so nobody searches for them.
    yield from (f"{level} A report {{ data-search-exclude }}", "", one.made, "", "```text")
    yield STACKS.split(render_text(one.diagnosis))[0].rstrip()
    yield from ("```", "", f"[The whole report, as a page]({_report(one.name, number)})" + "{ target=_blank }", "")


def lowered(sentence: str) -> str:
    """As the continuation of another sentence."""
    first = sentence.split()[0]
    return sentence if first.isupper() and len(first) > 1 else sentence[:1].lower() + sentence[1:]


def _list(found: dict[str, list[Cause]]) -> str:
    lines = [
        "# All causes",
        "",
        "Each cause has a name, which is `rule` in `report.json`, and a page with an example report.",
        "`ncclsafe explain NAME` prints the same on a terminal.",
        "",
        "[My job hangs](../hangs/index.md) leads here from an error message.",
        "",
    ]
    for kind in RULES:
        lines += [f"## {kind}", "", "| cause | |", "|---|---|"]
        told = (one for name in sorted(found) for one in found[name] if one.kind == kind)
        lines += [f"| [`{one.name}`]({one.name}.md) | {one.summary.replace('|', chr(92) + '|')} |" for one in told]
        lines.append("")
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Inserts the help of a command where a page has ``<!-- help: diagnose -->``, and the plans of rules."""
    if page.file.src_uri.startswith("hangs/"):
        # Users who paste an error want the page on this error, and from there the cause.
        page.meta.setdefault("search", {"boost": ERRORS_FIRST})
    markdown = markdown.replace(PLANS, "\n".join(_plans()))
    return HELP.sub(lambda found: f"```text\n{_help(found[1].split())}```", markdown)


def _plans() -> Iterator[str]:
    """What the next start does about each cause, by the rules themselves; for a run that is long over, there is
    none."""
    for kind, rules in RULES.items():
        if kind == RECORDED:
            continue
        yield from (f"### {kind}", "", "| cause | plan |", "|---|---|")
        for rule in sorted(rules, key=lambda rule: rule.name):
            words = rule.plan_words.replace("``", "`")
            yield f"| [`{rule.name}`](../causes/{rule.name}.md) | {words if '`' in words else f'`{words}`'} |"
        yield ""


def _help(command: list[str]) -> str:
    printed, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with redirect_stdout(printed), suppress(SystemExit):
            main([*command, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return printed.getvalue()


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Shows Sphinx's roles in docstrings as code, and callbacks under the names that users import."""
    html = ROLE.sub(lambda found: f"<code>{found[1].rpartition('.')[2]}</code>", html)
    return re.sub(r"(?<=>)(\w+)Hooks(?=<)", r"\1", html).replace("<p>Example::</p>", "<p>Example:</p>")
