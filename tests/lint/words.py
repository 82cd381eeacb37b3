"""Keep idioms out that slow readers down whose first language is another one: ``python tests/lint/words.py``.

Pages for people have none of them. Code has no more of each than `CODE_MAXIMUM`: lower a number when the
code has fewer, never raise one.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

PROJECT: Final = Path(__file__).parents[2]
INSTEAD: Final = {
    "whoever": "name the person or the process",
    "nobody": "name the person or the process, or write 'no user', 'no process'",
    "anew": "again, once more, new",
    "is told": "gets, receives; or make the sender the subject",
    "has heard": "received",
    "goes on": "continues, resumes, still runs",
    "of ours": "manycpu's",
    "let be": "leave alone, do not touch",
    "what is there": "name the thing",
    "for want of": "because ... is missing",
}
"""Word -> what to write instead."""
CODE_MAXIMUM: Final = {
    "whoever": 0,
    "nobody": 17,
    "anew": 4,
    "is told": 1,
    "has heard": 0,
    "goes on": 0,
    "of ours": 1,
    "let be": 0,
    "what is there": 0,
    "for want of": 0,
}
PAGES: Final = ("*.md", ".github/**", "docs/**")
GENERATED: Final = (
    "docs/benchmarks.md",
    "docs/cli.md",
    "docs/fields.md",
    "docs/operators.md",
    "docs/scale.md",
)
"""Pages that are written from the code, where their words are counted."""
CODE: Final = (
    "bench",
    "dags",
    "docker",
    "examples",
    "operators",
    "pipeline",
    "tests",
    "Makefile",
    "pyproject.toml",
)
_WORDS: Final = {
    word: re.compile(r"\b" + word.replace(" ", r"\s+") + r"\b", re.IGNORECASE) for word in INSTEAD
}


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    found = [*in_pages(_read(PAGES)), *above(counted(_read(CODE)), CODE_MAXIMUM)]
    sys.stdout.writelines(f"{line}\n" for line in found)
    return int(bool(found))


def in_pages(pages: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each word of the list that a page has."""
    for name, text in pages:
        if name in GENERATED:
            continue
        for word, pattern in _WORDS.items():
            for match in pattern.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                yield f"{name}:{line}: {word!r}: {INSTEAD[word]}"


def counted(files: Iterable[tuple[str, str]]) -> Counter[str]:
    """Count each word of the list in code."""
    total: Counter[str] = Counter()
    for _, text in files:
        total.update({word: len(pattern.findall(text)) for word, pattern in _WORDS.items()})
    return total


def above(counts: Counter[str], maximum: dict[str, int]) -> Iterator[str]:
    """Yield a line for each word that the code has more often than it may."""
    for word, most in maximum.items():
        if counts[word] > most:
            yield f"the code has {word!r} {counts[word]} times, and may have it {most} times: {INSTEAD[word]}"


def _read(patterns: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Read the text files that git tracks or would track; this list and its tests are left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True).stdout
    for name in dict.fromkeys(listed.splitlines()):
        path = PROJECT / name
        if path.is_file() and not name.startswith("tests/lint/"):
            try:
                yield name, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


if __name__ == "__main__":
    sys.exit(main())
