"""Check the list of words that `make lint` keeps out of pages."""

import runpy
from collections import Counter
from pathlib import Path
from typing import Any

WORDS: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("words.py")))


def test_a_word_of_the_list_is_found_with_its_line_also_across_lines() -> None:
    pages = [("a.md", "One.\nWhoever waits.\nA run goes\non."), ("b.md", "It renews the lease.")]
    assert list(WORDS["in_pages"](pages)) == [
        "a.md:2: 'whoever': name the person or the process",
        "a.md:3: 'goes on': continues, resumes, still runs",
    ]


def test_other_words_that_contain_one_are_not_found() -> None:
    assert list(WORDS["in_pages"]([("a.md", "Manewton sails; a canew; outlet begins")])) == []


def test_generated_pages_count_as_the_code_that_they_come_from() -> None:
    assert list(WORDS["in_pages"]([("docs/fields.md", "whoever")])) == []


def test_code_with_more_of_a_word_than_today_is_refused() -> None:
    counts = WORDS["counted"]([("a.py", "# nobody, nobody"), ("b.py", "anew")])
    assert counts == Counter({"nobody": 2, "anew": 1})
    (line,) = WORDS["above"](counts, {"nobody": 1, "anew": 1})
    assert line.startswith("the code has 'nobody' 2 times, and may have it 1 times: ")
