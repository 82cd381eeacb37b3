"""A report as one HTML file: what stands in it, and what nothing in it can do."""

import json
import re
from html import unescape
from typing import Any

import pytest
from support.made_reports import HOSTILE, large_report, usual_report

from manycpu.pipeline.page import _MODULES, _script, as_frame, as_html
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.output import is_page


def embedded(page: str) -> Any:
    """Read back the report that a page carries."""
    found = re.findall(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


NASTY = ("</script><script>alert(1)</script>", "<!--<script>", "]]>", "\u2028\u2029", "\x00", "&lt;", HOSTILE)


@pytest.mark.parametrize("text", NASTY)
def test_nothing_that_a_run_says_ends_the_element_it_stands_in(text: str) -> None:
    report = usual_report(name=text, warnings=[text], metrics={text: text}, series={text: {"values": [1.0]}})
    page = as_html(report)
    assert embedded(page) == report
    assert page.count("<script") == as_html({}).count("<script")
    assert page.count("</script") == as_html({}).count("</script")


def test_the_title_is_text() -> None:
    assert "<title>&lt;b&gt;x · manycpu</title>".replace("·", "&#183;") in as_html({"name": "<b>x"})


@pytest.mark.parametrize("name", [None, 7, ["x"], "\ud800"])
def test_a_name_of_any_shape_makes_a_page_that_can_be_written(name: object) -> None:
    assert is_page(as_html({"name": name}).encode().decode())


@pytest.mark.parametrize("half", [{}, {"name": "x"}, {"metrics": None, "ranks": 7}, {"unheard-of": {}}])
def test_half_a_report_is_a_page_too(half: dict[str, Any]) -> None:
    assert embedded(as_html(half)) == half


def test_numbers_that_json_does_not_have_are_words() -> None:
    page = as_html({"metrics": {"loss": float("nan"), "most": [float("inf"), 1.5]}})
    assert embedded(page)["metrics"] == {"loss": "nan", "most": ["inf", 1.5]}


def test_the_page_may_load_nothing_and_run_only_its_own_code() -> None:
    page = as_html(usual_report())
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/=]+'", rules["script-src"])
    assert not re.findall(r"""(?:src|href)=["'](?!data:,)|@import|url\(""", page.replace(HOSTILE, ""))


def test_the_modules_are_joined_without_a_link_between_them() -> None:
    assert not re.findall(r"^(?:import|export)\b", _script(), re.MULTILINE)
    named = re.findall(r"^(?:async )?(?:function|class|const|let) (\w+)", _script(), re.MULTILINE)
    assert len(named) == len(set(named)) > 50
    assert len(_MODULES) == 10


def test_no_module_writes_markup() -> None:
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", _script())


def test_the_page_of_a_very_large_run_is_small_enough_to_send() -> None:
    assert len(as_html(large_report())) < 2_000_000


def test_a_report_shows_itself_in_a_notebook() -> None:
    fields = {name: usual_report()[name] for name in ("key", "name", "state", "attempts", "run", "target")}
    report = Report.model_validate({**fields, "metrics": {HOSTILE: 1.5}})
    shown = report._repr_html_()
    assert shown == as_frame(report.model_dump(mode="json"))
    assert shown.count("<") == 2  # the frame, and its end
    (page,) = re.findall(r'^<iframe sandbox="allow-scripts" .* srcdoc="([^"]*)"></iframe>$', shown, re.DOTALL)
    assert embedded(unescape(page))["metrics"] == {HOSTILE: 1.5}
