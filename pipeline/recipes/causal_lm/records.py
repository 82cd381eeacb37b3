"""Check records by the standard library alone, so that preflight can before a run starts.

The recipe makes the same checks again, of the real objects.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from manycpu.pipeline.recipes.files import below
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.words import did_you_mean

SPLITS: Final = {"train": ("train",), "validation": ("validation", "valid", "val", "eval", "dev")}
"""Split -> how the names of its files begin."""
SUFFIXES: Final = (".jsonl", ".json", ".parquet")
ALL_LINEAR: Final = "all-linear"
_SUFFIX_NAMES: Final = ", ".join(SUFFIXES)
FIX: Final = "Give a column text, the columns prompt and completion, or a column messages; or name yours"
_MAX_CHECKED: Final = 1000  # records of a file that preflight reads
_MARK: Final = "\ue000"  # of Unicode's private use: no text has it
_END_OF_THOUGHT: Final = "</think>"  # templates may leave out what is before


class Render(Protocol):
    """Writes messages as text by a chat template.

    With ``begins_answer``, the text ends with what the template writes before an answer of the assistant.
    """

    def __call__(self, messages: Sequence[Mapping[str, Any]], *, begins_answer: bool) -> str: ...


class Columns(NamedTuple):
    """The names of the columns that may hold the data."""

    text: str = "text"
    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"

    def kind(self, present: Iterable[str]) -> str | None:
        """Return the kind of a data set by the columns that it has: ``messages``, ``completion`` or ``text``.

        None: it has the columns of no kind.
        """
        present_columns = set(present)
        defaults = {"messages": ["messages"], "completion": ["prompt", "completion"], "text": ["text"]}
        names = {kind: [getattr(self, name) for name in columns] for kind, columns in defaults.items()}
        kinds = [kind for kind, columns in names.items() if present_columns.issuperset(columns)]
        # A kind whose columns an option renames comes first, then the order above counts.
        return min(kinds, key=lambda kind: names[kind] == defaults[kind], default=None)

    def fault(self, record: Mapping[str, Any], kind: str) -> str | None:
        """Explain what is wrong with a record; None if it can be trained on."""
        if kind == "messages":
            return _conversation_fault(record.get(self.messages))
        names = (self.text,) if kind == "text" else (self.prompt, self.completion)
        for name in names:
            if not isinstance(record.get(name), str):
                return f"its {name} is no text"
        if kind == "completion" and not record[self.completion].strip():
            return f"its {self.completion} is empty"
        return None


def _conversation_fault(messages: Any) -> str | None:
    """Explain what is wrong with the messages of a record; None: they can be trained on."""
    if not isinstance(messages, list) or not messages:
        return "its messages are no list"
    for message in messages:
        is_message = isinstance(message, dict) and all(
            isinstance(message.get(name), str) for name in ("role", "content")
        )
        if not is_message:
            return "a message of it has no role or no content"
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if not any(answer.strip() for answer in answers):
        return "it has no answer of an assistant"
    return None


def splits(path: str | Path) -> dict[str, list[Path]]:
    """Find the files of each split in a folder; a single file is the split train, whatever its name.

    Raises:
        BadInputError: There is nothing to train on, or the files of a split differ in format.
    """
    path, fix = Path(path), "Give a file, or a folder with train*.jsonl or train*.parquet"
    if path.is_file():
        return of_one_format({"train": [path]})
    by_split: dict[str, list[Path]] = {}
    files = [file for file in below(path) if file.suffix in SUFFIXES]
    for file in files:
        if split := _split(file):
            by_split.setdefault(split, []).append(file)
    if not by_split and len(files) == 1:
        by_split = {"train": files}
    if not by_split:
        raise BadInputError(f"{path} holds no file that could be a data set", field="run.data", fix=fix)
    if "train" not in by_split:
        message = f"{path} holds nothing to train on: by its name, {files[0].name} is to evaluate on"
        raise BadInputError(message, field="run.data", fix=fix)
    return of_one_format(by_split)


def of_one_format(found: dict[str, list[Path]]) -> dict[str, list[Path]]:
    """Return the files of each split unchanged, if all files of a split have the same format.

    JSON lines and JSON lists count as one format, Parquet as another.

    Raises:
        BadInputError: A file has neither format, or a split has both.
    """
    for split, files in found.items():
        for file in files:
            if file.suffix not in SUFFIXES:
                message = f"{file} is neither JSON lines nor Parquet"
                raise BadInputError(message, field="run.data", fix=f"Convert it to one of {_SUFFIX_NAMES}")
        if len({file.suffix == ".parquet" for file in files}) > 1:
            message = f"the {split} split has both JSON lines and Parquet: {files[0]} and {files[-1]}"
            raise BadInputError(message, field="run.data", fix="Keep one of them, or convert it")
    return found


def _split(file: Path) -> str | None:
    """Return the split that a file belongs to by the beginning of its name; None: no split."""
    name = file.name.lower()
    return next((split for split, starts in SPLITS.items() if name.startswith(starts)), None)


def read(file: Path) -> Iterator[dict[str, Any]]:
    """Read the records of JSON lines, of one JSON list or of Parquet.

    Raises:
        BadInputError: The file cannot be read, or a line of it is no object.
    """
    if file.suffix == ".parquet":
        yield from _rows(file)
        return
    number = 1  # for an error before the first record
    with file.open(encoding="utf-8-sig") as stream:
        first_line = next((line for line in stream if line.strip()), "")
        is_list = first_line.lstrip().startswith("[")
        stream.seek(0)
        try:
            items = json.load(stream) if is_list else stream
            for number, item in enumerate(items, 1):
                if not is_list and not item.strip():
                    continue  # an empty line holds no record
                record = item if is_list else json.loads(item)
                if not isinstance(record, dict):
                    raise _no_record(file, number, "no object")
                yield record
        except ValueError as error:
            raise _no_record(file, number, f"not JSON: {error}") from error


def _no_record(file: Path, number: int, what: str) -> BadInputError:
    message = f"{file}, line {number} is {what}"
    return BadInputError(message, field="run.data", fix="Give one record a line")


def check(
    path: str | Path,
    columns: Columns,
    render: Render | None = None,
    *,
    has_template: bool = True,
    limits: Mapping[str, int] | None = None,
) -> list[str]:
    """Check the first records of each file; returns notes on what could not be checked.

    Args:
        path: A file or a folder.
        columns: The names of its columns.
        render: Writes messages; None: the chat template is not known, so conversations are checked in part.
        has_template: False: the tokenizer is known to have no chat template.
        limits: Split -> how many of its records are used; a split that is missing uses all.

    Raises:
        BadInputError: A file has no such columns, a record cannot be trained on, or there are messages and
            no chat template.
    """
    notes = []
    for split, files in splits(path).items():
        remaining = (limits or {}).get(split, sys.maxsize)
        for file in files:
            if file.suffix == ".parquet" and find_spec("pyarrow") is None:
                notes.append(f"{file.name} is not checked: pyarrow is not installed here")
                remaining = 0  # this file may hold all records that are used: skip the next ones
            elif remaining:
                first_records = list(islice(read(file), min(_MAX_CHECKED, remaining)))
                _check_records(file, first_records, columns, render, has_template=has_template)
                remaining -= len(first_records)
    return notes


def _check_records(
    file: Path, found: Sequence[dict[str, Any]], columns: Columns, render: Render | None, has_template: bool
) -> None:
    """Raise BadInputError if there are no records, or one of them cannot be trained on."""
    if not found:
        raise BadInputError(f"{file} holds no record", field="run.data", fix="Give one record a line")
    kind = kind_of(columns, found[0], str(file))
    for number, record in enumerate(found, 1):
        if problem := columns.fault(record, kind):
            raise BadInputError(f"{file}, record {number}: {problem}", field="run.data", fix=FIX)
        if kind == "messages" and not has_template:
            raise no_template()
        if kind == "messages" and render:
            answer_spans(record[columns.messages], render, f"{file}, record {number}")


def no_template() -> BadInputError:
    """Build the error that messages cannot be written without a chat template."""
    fix = "Choose the model's version for chats, or give prompt and completion instead"
    return BadInputError("the tokenizer has no chat template", field="run.model", fix=fix)


def kind_of(columns: Columns, present: Iterable[str], source: str) -> str:
    """Return the kind of a data set by its columns; raises BadInputError where it has none of them.

    ``source`` names the data set, for the message.
    """
    present = list(present)
    if kind := columns.kind(present):
        return kind
    message = f"{source} has none of the columns {', '.join(columns)}; it has {', '.join(present)}"
    raise BadInputError(message, field="run.data", fix=f"{FIX} by --text_column and the like")


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a Parquet file; raises BadInputError if it is none."""
    from pyarrow import lib, parquet  # type: ignore[import-untyped]

    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=_MAX_CHECKED):
                yield from batch.to_pylist()
    except (lib.ArrowInvalid, OSError) as error:
        message = f"{file} is no Parquet file: {error}"
        raise BadInputError(message, field="run.data", fix="Write it again") from error


def answer_spans(
    messages: Sequence[Mapping[str, Any]], render: Render, source: str
) -> tuple[str, list[tuple[int, int]]]:
    """Write a conversation as text, and find its answers: begin and end of each, in characters.

    An answer is what the assistant says, and the text by which the template ends the assistant's turn.

    Raises:
        BadInputError: The chat template refuses the messages, or leaves out an answer, or a part of it.
    """
    write = _with_bad_input_errors(render, source)
    text = write(messages, begins_answer=False)
    spans: list[tuple[int, int]] = []
    spans_by_number: dict[int, tuple[int, int]] | None = None  # None: not needed so far
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # transformers refuses an empty list of messages.
        text_before = write(messages[:number], begins_answer=True) if number else ""
        text_through = write(messages[: number + 1], begins_answer=False)
        answer_text = message["content"].rpartition(_END_OF_THOUGHT)[2].strip()
        # Most templates write a turn in the same way whatever follows: the answer is what the turn adds. Not
        # so the first message: what it adds includes the header of its turn.
        is_prefix = number > 0 and text.startswith(text_before) and text.startswith(text_through)
        if is_prefix and _writes_whole_answer(answer_text, messages[: number + 1], write):
            spans.append((len(text_before), len(text_through)))
            continue
        # Templates may write an earlier turn in another way than the last one.
        if spans_by_number is None:
            spans_by_number = _spans_by_marks(messages, write, text)
        if number not in spans_by_number:
            raise BadInputError(
                f"{source}: the chat template cuts off or changes the answer {message['content'][:40]!r}",
                field="run.model",
                fix="Mend the tokenizer's chat template, or give prompt and completion instead",
            )
        spans.append(spans_by_number[number])
    return text, spans


def _writes_whole_answer(answer: str, messages: Sequence[Mapping[str, Any]], write: Render) -> bool:
    """Whether the template writes the whole answer, which is the end of the last message.

    A mark is added to the message. In the text, the mark must directly follow the answer. A plain search for
    the answer would also find its words elsewhere. True for an empty answer, which cannot be cut off.
    """
    *earlier, last = messages
    marked = {**last, "content": last["content"].rstrip() + _MARK}
    return not answer or answer + _MARK in write([*earlier, marked], begins_answer=False)


def _spans_by_marks(
    messages: Sequence[Mapping[str, Any]], write: Render, text: str
) -> dict[int, tuple[int, int]]:
    """Find the answers in ``text``, which is what the template makes of the messages.

    The messages are written again, with a mark instead of each answer. The text between the marks must be in
    ``text`` too; the rest of ``text`` is the answers. The template may have stripped them.

    Returns:
        Number of an answer's message -> its begin and end in ``text``; empty if the template changes an
        answer or the text around it.
    """
    marks = {
        number: f"{_MARK}{number}{_MARK}"
        for number, message in enumerate(messages)
        if message["role"] == "assistant"
    }
    marked_messages = [
        {**message, "content": marks.get(number, message["content"])}
        for number, message in enumerate(messages)
    ]
    rest_of_marked = write(marked_messages, begins_answer=False)
    position = 0  # in `text`: all before it is found
    spans: dict[int, tuple[int, int]] = {}
    for number, mark in marks.items():
        head, _, rest_of_marked = rest_of_marked.partition(mark)
        following = rest_of_marked.partition(_MARK)[0]  # up to the next mark
        content = messages[number]["content"]
        forms = (content, content.strip(), content.lstrip(), content.rstrip())
        # `following` tells the forms apart: else space of the template would pass for the answer's own.
        written = next((form for form in forms if text.startswith(head + form + following, position)), None)
        if written is None:
            return {}
        begin = position + len(head)
        position = begin + len(written)
        end = position
        # Of a conversation that ends here, the text after its last mark is what ends the assistant's turn.
        end_of_turn = write(marked_messages[: number + 1], begins_answer=False).rpartition(mark)[2]
        if rest_of_marked.startswith(end_of_turn):
            end += len(end_of_turn)
        spans[number] = (begin, end)
    return spans if text[position:] == rest_of_marked else {}


def _with_bad_input_errors(render: Render, source: str) -> Render:
    """Wrap ``render``, so that each of its errors becomes BadInputError."""

    def write(messages: Sequence[Mapping[str, Any]], *, begins_answer: bool) -> str:
        try:
            return render(messages, begins_answer=begins_answer)
        except Exception as error:
            raise BadInputError(
                f"{source}: the chat template refuses its messages: {error}",
                field="run.data",
                fix="Give roles that it takes, in its order, or prompt and completion instead",
            ) from error

    return write


def missing_target(targets: Sequence[str], layers: Sequence[str]) -> tuple[str, str] | None:
    """Find the first target that names no layer; returns what is wrong, and the fix; None: all name one.

    >>> missing_target(["q_proj", "vproj"], ["layers.0.q_proj", "layers.0.v_proj"])[1]
    "Did you mean 'v_proj'?"
    """
    if list(targets) == [ALL_LINEAR]:
        return None
    last_parts = sorted({layer.rpartition(".")[2] for layer in layers})
    for target in targets:
        if any(is_target(layer, target) for layer in layers):
            continue
        message = (
            f"the model has no layer {target!r} for --lora_target_modules; it has {', '.join(last_parts)}"
        )
        return message, did_you_mean(target, last_parts) or f"Name some of them, or {ALL_LINEAR}"
    return None


def is_target(layer: str, target: str) -> bool:
    """Whether a target names a layer: by its whole name, or by the end of it.

    >>> is_target("layers.0.q_proj", "q_proj"), is_target("layers.0.xq_proj", "q_proj")
    (True, False)
    """
    return layer == target or layer.endswith(f".{target}")


def tied_target(target: str) -> tuple[str, str]:
    """Return why an adapter of a head and embeddings that share weights is not merged, and the fix."""
    message = f"--lora_target_modules {target}: the model's head shares the weights of its embeddings, "
    return message + "and a merged adapter would change both", "Leave it out, or add --merge_adapter False"


def _raise_exception(message: str) -> None:
    """Refuse messages: chat templates call this as ``raise_exception``."""
    raise ValueError(message)


def renderer(settings: Mapping[str, Any]) -> Render | None:
    """Return a function that writes messages as transformers does; None: no jinja2, or no usable template."""
    template = settings.get("chat_template")
    if not isinstance(template, str) or find_spec("jinja2") is None:
        return None
    from jinja2 import TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # As transformers makes it, so that a template writes the same text.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # Functions and a filter that transformers adds: jinja2's own tojson escapes what HTML does not allow.
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": time.strftime}
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False} | options
    )
    special_tokens = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token")
    }
    try:
        variables = meta.find_undeclared_variables(environment.parse(template))
        if any(name.endswith("_token") and name not in special_tokens for name in variables):
            return None  # a token that the tokenizer's class has, perhaps
        compiled = environment.from_string(template)
        # A trial: it fails if the template needs what only transformers has.
        compiled.render(
            messages=[{"role": "user", "content": "a"}], add_generation_prompt=True, **special_tokens
        )
    except (TemplateError, TypeError, ValueError):
        return None

    def render(messages: Sequence[Mapping[str, Any]], *, begins_answer: bool) -> str:
        # Parquet has None for a key that only other messages have; transformers leaves it out too.
        present = [{name: value for name, value in each.items() if value is not None} for each in messages]
        return compiled.render(messages=present, add_generation_prompt=begins_answer, **special_tokens)

    return render
