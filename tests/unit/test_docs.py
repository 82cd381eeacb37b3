"""Check that the README and the pages of docs/ show what the package accepts."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from manycpu.pipeline.cli import cli
from manycpu.pipeline.spec.validation import read_run, read_target

ROOT = Path(__file__).parents[2]
AT_THE_ROOT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = {
    page.name: page.read_text()
    for page in (*(ROOT / name for name in AT_THE_ROOT), *sorted((ROOT / "docs").glob("*.md")))
}
CODE = re.compile(r"```(?P<language>[a-z]*)\n(?P<block>.*?)```|`(?P<span>[^`\n]+)`", re.DOTALL)
OF_DEVELOPERS = (
    "CONTRIBUTING.md",
    "architecture.md",
    "events.md",
    "reliability.md",
    "test-cluster.md",
    "testing.md",
)
OF_OTHERS = {"run_clm_no_trainer.py", "run_mlm_no_trainer.py"}  # examples of transformers
OF_TESTS = ("cluster",)  # packages that a page on testing imports


def blocks(language: str) -> list[Any]:
    return [
        pytest.param(found["block"], id=f"{name}-{number}")
        for name, text in PAGES.items()
        for number, found in enumerate(CODE.finditer(text))
        if found["language"] == language
    ]


def code() -> str:
    """All that stands as code, with wrapped commands joined."""
    found = (one for text in PAGES.values() for one in CODE.finditer(text))
    return "\n".join(one["block"] or one["span"] or "" for one in found).replace("\\\n", " ")


@pytest.mark.parametrize("text", blocks("yaml"))
def test_run_files_are_valid(text: str) -> None:
    fields: dict[str, Any] = yaml.safe_load(text)
    assert read_run(fields["run"]).output
    assert read_target(fields["target"])


@pytest.mark.parametrize("text", blocks("python"))
def test_what_is_imported_can_be(text: str) -> None:
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    ours = [node for node in imports if not ast.unparse(node).split()[1].startswith(OF_TESTS)]
    exec("\n".join(ast.unparse(node) for node in ours), {})  # noqa: S102 - the pages are ours
    assert imports


def test_names_that_prose_calls_can_be_imported_from_where_users_look() -> None:
    import manycpu.pipeline

    called = set(re.findall(r"(?:target|run)=(\w+)\(", code()))
    assert called == {"Kubernetes", "Local", "TrainingRun"}
    assert called <= set(manycpu.pipeline.__all__)
    assert [name for name in manycpu.pipeline.__all__ if not hasattr(manycpu.pipeline, name)] == []


def test_every_command_that_is_named_exists() -> None:
    named = set(re.findall(r"(?:^|[\s(])manycpu ([a-z]+)", code(), re.MULTILINE))
    assert named > {"preflight", "run"}
    assert named <= set(cli.commands)


def test_every_option_that_is_named_exists() -> None:
    shown = re.findall(r"(?:^|[\s(])manycpu ([a-z]+)([^\n`#]*)", code(), re.MULTILINE)
    known = {
        name: {flag for one in command.params for flag in one.opts} for name, command in cli.commands.items()
    }
    unknown = [
        f"manycpu {name} {option}"
        for name, words in shown
        for option in re.findall(r"--[a-z][\w-]*", words)
        if option not in known[name]
    ]
    assert unknown == []


@pytest.mark.parametrize("name", cli.commands)
def test_no_option_of_a_command_is_another_of_its_options_too(name: str) -> None:
    flags = [flag for one in cli.commands[name].params for flag in one.opts]
    assert sorted(flags) == sorted(set(flags))


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|\s)make ([a-z-]+)", code(), re.MULTILINE))
    assert targets > {"demo", "test"}
    assert [name for name in sorted(targets) if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGES["airflow.md"]))
    assert len(named) > 10
    files = [file.read_text() for file in (ROOT / "tests").rglob("test_*.py")]
    assert [name for name in sorted(named) if not any(f"def {name}(" in text for text in files)] == []


def test_the_readme_begins_with_the_demo_and_the_tests() -> None:
    first = blocks("sh")[0].values[0]
    assert re.findall(r"^make (\w+)", first, re.MULTILINE) == ["demo", "test", "ui"]


def test_the_readmes_first_install_line_says_how_to_have_ccl_and_what_it_is_without() -> None:
    (line,) = re.findall(r"^pip install 'manycpu\[.*$", PAGES["README.md"], re.MULTILINE)[:1]
    assert re.match(r"pip install 'manycpu\[[a-z,]*\bccl\b[a-z,]*\]'", line)
    assert "gloo" in line


@pytest.mark.parametrize("name", PAGES)
def test_every_link_and_picture_is_there(name: str) -> None:
    folder = ROOT if name in AT_THE_ROOT else ROOT / "docs"
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGES[name])
    links += re.findall(r'(?:src|srcset)="([^"]+)"', PAGES[name])
    assert [link for link in links if "://" not in link and not (folder / link).exists()] == []


def test_every_anchor_that_the_readme_names_is_there() -> None:
    """The README is no page of the site, whose build checks all others."""
    named = re.findall(r"\]\((?:docs/)?([\w-]+\.md)#([^)]+)\)", PAGES["README.md"])
    assert named
    assert [(page, anchor) for page, anchor in named if anchor not in anchors(PAGES[page])] == []


def anchors(text: str) -> set[str]:
    """Slugs of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_navigation_once() -> None:
    trees = re.findall(r"```\{toctree\}\n(.*?)```", PAGES["index.md"], re.DOTALL)
    listed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    pages = {f"../{name}" for name in AT_THE_ROOT} | {name for name in PAGES if name not in AT_THE_ROOT}
    assert sorted(f"{name}.md" for name in listed) == sorted(pages - {"../README.md", "index.md"})


def test_the_readme_is_read_in_minutes() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 200


def test_every_file_that_a_message_or_comment_names_is_there() -> None:
    sources = [
        path for part in ("operators", "pipeline", "dags", "docker") for path in (ROOT / part).rglob("*.py")
    ]
    text = "\n".join(path.read_text() for path in sources)
    named = set(re.findall(r"(?<![\w/])docs/\w[\w-]*\.\w+", text))
    assert named
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("name", OF_DEVELOPERS)
def test_every_file_of_the_code_that_a_page_names_is_there(name: str) -> None:
    """A page may leave out the first folders of a path."""
    parts = ("bench", "dags", "docker", "docs", "examples", "operators", "pipeline", "tests")
    there = {f"/{path.relative_to(ROOT)}" for part in parts for path in (ROOT / part).rglob("*.*")}
    there |= {f"/{path.name}" for path in ROOT.iterdir()}
    named = set(re.findall(r"`([\w./-]+\.(?:py|js|toml|yaml))`", PAGES[name])) - OF_OTHERS
    assert named
    unknown = [file for file in named if "NAME" not in file and not any(map(_ends(file), there))]
    assert sorted(unknown) == []


def _ends(file: str) -> Callable[[str], bool]:
    return lambda path: path.endswith(f"/{file}")


@pytest.mark.parametrize("name", ["fields.md", "cli.md", "operators.md", "large_models.md"])
def test_the_reference_pages_are_up_to_date(name: str) -> None:
    import runpy

    pages = runpy.run_path(str(ROOT / "docs" / "reference.py"))["pages"]()
    assert PAGES[name] == pages[name], "run `make docs`"


def test_the_reference_of_the_command_line_has_what_help_prints() -> None:
    from click.testing import CliRunner

    for name in cli.commands:
        more = "--help-all" if name in ("run", "preflight", "plan", "render", "image") else "--help"
        printed = CliRunner().invoke(cli, [name, more]).output
        options = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", printed.partition("\n\n")[2]))
        assert sorted(option for option in options if option not in PAGES["cli.md"]) == [], name


def test_the_reference_of_operators_has_all_that_the_package_offers() -> None:
    import manycpu.operators

    missing = [name for name in manycpu.operators.__all__ if f"\n## `{name}`\n" not in PAGES["operators.md"]]
    assert missing == []


def test_the_pages_of_benchmarks_show_the_results_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    monkeypatch.syspath_prepend(str(ROOT))
    for name, text in importlib.import_module("bench._page").pages().items():
        assert text == PAGES[name], "run `make docs`"


def test_the_page_on_reliability_shows_the_results_that_are_kept() -> None:
    import runpy

    page = runpy.run_path(str(ROOT / "docs" / "reliability.py"))["page"]()
    assert page == PAGES["reliability.md"], "run `make docs`"


def test_every_benchmark_has_words_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    """A title, a sentence of what it means, and a goal beside its figure for each target that it has."""
    import importlib
    import json

    monkeypatch.syspath_prepend(str(ROOT))
    page = importlib.import_module("bench._page")
    scale = importlib.import_module("bench.scale.__main__").names()
    for name in [*importlib.import_module("bench.__main__").names(), *(f"scale/{each}" for each in scale)]:
        words = page.words(name)
        assert words["title"]
        assert words["meaning"].endswith(".")
        result = ROOT / "bench" / "results" / f"{name}.json"
        figures = json.loads(result.read_text())["figures"] if result.exists() else {}
        goals = [row for row in page.rows(figures, words) if not row.endswith("|  |")]
        assert bool(goals) == any(key in figures for key in ("target", "limit")), name


def test_a_benchmark_without_words_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    monkeypatch.syspath_prepend(str(ROOT))
    page = importlib.import_module("bench._page")
    with pytest.raises(LookupError, match="no words for the figure 'new_seconds'"):
        list(page.rows({"new_seconds": 1.0}, {"figures": {"old_seconds": ("Old", "s", "")}}))
    assert list(
        page.rows(
            {"new_seconds": 1.0, "limit": 2}, {"figures": {"new_seconds": ("New", "s", "under [limit]")}}
        )
    ) == ["| New | 1 s | under 2 |"]


def test_a_figure_of_scale_beyond_its_limit_is_named_and_one_that_lacks_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import importlib

    monkeypatch.syspath_prepend(str(ROOT))
    exceeded = importlib.import_module("bench.scale.__main__").exceeded
    figures = {"ledger": 2.0, "memory": 3.0, "limit": {"ledger": 2.0, "memory": 2.5, "cpu": 1.0}}
    assert list(exceeded(figures)) == ["memory is 3.0, and may be 2.5", "cpu is None, and may be 1.0"]
