"""What is said of a release in several places is the same in all: version, date, requirements, extras, actions."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import lightning_ncclsafe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
RECIPE = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
# Where conda-forge has a package under another name.
OF_CONDA = {"torch": "pytorch"}


def sections() -> list[tuple[str, str]]:
    """Version and date of each section of the changelog, the newest first; no date for what is not released."""
    return re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_the_version_is_the_newest_in_the_changelog() -> None:
    (unreleased, no_date), (version, date), *_ = sections()
    assert (unreleased, no_date) == ("Unreleased", "")
    assert version == lightning_ncclsafe.__version__ and date


def test_the_citation_has_the_version_and_date() -> None:
    released = sections()[1]
    assert (CITATION["version"], CITATION["date-released"]) == released
    assert (CITATION["title"], CITATION["license"]) == (PROJECT["name"], PROJECT["license"])


def test_the_recipe_has_the_version_and_the_same_requirements() -> None:
    assert RECIPE["context"] == {"name": PROJECT["name"], "version": lightning_ncclsafe.__version__}
    wanted = {}
    for requirement in map(Requirement, PROJECT["dependencies"]):
        wanted[OF_CONDA.get(requirement.name, requirement.name)] = requirement.specifier
    python, *others = [each for each in RECIPE["requirements"]["run"] if not each.startswith("__")]
    asked = {Requirement(each).name: Requirement(each).specifier for each in others}
    assert asked == wanted
    assert python == "python >=${{ python_min }}"
    assert RECIPE["build"]["python"]["entry_points"] == [f"ncclsafe = {PROJECT['scripts']['ncclsafe']}"]


def test_every_requirement_has_a_comment() -> None:
    """Except those that every Lightning user already has."""
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("dependencies = [") : text.index("[project.scripts]")]
    lines = [line.strip() for line in block.splitlines() if line.strip().startswith('"')]
    assert len(lines) == len(PROJECT["dependencies"])
    unexplained = {re.split('[>="]', line)[1] for line in lines if "#" not in line}
    assert unexplained == {"torch", "torchmetrics", "tensorboard"}


def test_extras_named_by_other_extras_exist() -> None:
    extras = PROJECT["optional-dependencies"]
    named = {extra for asked in extras.values() for each in asked for extra in _extras_of_ours(each)}
    assert named <= extras.keys()


def _extras_of_ours(requirement: str) -> set[str]:
    parsed = Requirement(requirement)
    return parsed.extras if parsed.name == PROJECT["name"] else set()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_with_minimal_permissions(workflow: Path) -> None:
    text = workflow.read_text()
    uses = re.findall(r"uses: (\S+)(.*)", text)
    assert uses
    for action, comment in uses:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) and re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action
    # As of other workflows: the same action everywhere.
    everywhere = {use for other in WORKFLOWS for use in re.findall(r"uses: (\S+)@(\S+)", other.read_text())}
    assert len({action for action, _ in everywhere}) == len(everywhere)
    read: dict[str, Any] = yaml.safe_load(text)
    assert read["permissions"] == {}
    assert all(job["permissions"] and job["timeout-minutes"] for job in read["jobs"].values())


def test_only_the_publish_job_can_publish() -> None:
    read = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    may = {name for name, job in read["jobs"].items() if "id-token" in job["permissions"]}
    assert may == {"publish"} and read["jobs"]["publish"]["environment"] == "pypi"
    # It runs nothing of the checkout.
    assert not [step for step in read["jobs"]["publish"]["steps"] if "run" in step or "checkout" in step["uses"]]


@pytest.mark.parametrize("form", [form for form in FORMS if form.stem != "config"], ids=lambda path: path.stem)
def test_forms_ask_for_the_report(form: Path) -> None:
    read = yaml.safe_load(form.read_text())
    assert read["name"] and read["description"]
    fields = {field["id"]: field for field in read["body"] if "id" in field}
    assert len(fields) == len([field for field in read["body"] if field["type"] != "markdown"])
    assert fields["report"]["attributes"]["label"] == "report.json"
    assert all(field["attributes"]["label"] for field in fields.values())


def test_paths_named_in_documents_exist() -> None:
    for paper in ("CONTRIBUTING.md", "SECURITY.md", "examples/README.md"):
        text = (ROOT / paper).read_text()
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert ((ROOT / paper).parent / target).exists(), (paper, target)
        for path in re.findall(r"`((?:tests|lightning_ncclsafe|conda|\.github)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), (paper, path)
