"""Whole fine-tunings, from start to a written model: public scripts beside `manycpu run` of the same.

Nothing of the scripts is here. ``--scripts FOLDER`` names transformers' ``examples/pytorch``, which needs the
package ``evaluate``; the results name the versions.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import _questions
from bench._measure import SkippedError, ratio, rounds, spread
from manycpu.pipeline.recipes.question_answering.demo import demo_run

SCRIPTS: Final = "MANYCPU_BENCH_SCRIPTS"
ROOT: Final = Path(__file__).parents[1]
RANKS: Final = 2
BATCH: Final = 8
LIMIT: Final = 900.0  # seconds
TARGETS: Final = {
    "over the script, without AMX": 3.3,
    "over the script, with AMX": 4,
    "over the script with --bf16": 2.5,
    "points of F1 lost": 0.5,
}
WORDS = {
    "title": "A whole fine-tuning",
    "meaning": "The same data, model, epochs, batch and seeds take a fraction of the public script's time "
    "by its defaults, mostly by not computing on padding.",
    "figures": {
        r"questions|samples": ("Questions of a training", "", ""),
        r"(\w+): seconds: (.+)": (r"\1: from start to a written model, \2", "s", ""),
        r"(\w+): samples/s: (.+)": (r"\1: speed of the training, \2", "samples/s", ""),
        r"(\w+): tokens/s: (.+)": (r"\1: speed without padding, \2", "tokens/s", ""),
        r"(\w+): f1: (.+)": (r"\1: F1, \2", "%", ""),
        r"(\w+): over the script: manycpu": (
            r"\1: the recipe's defaults train so many times as fast as the script's",
            "x",
            "at least [target: over the script, without AMX], with AMX [target: over the script, with AMX]",
        ),
        r"(\w+): over the script with --bf16: manycpu": (
            r"\1: and so many times as fast as the script with --bf16",
            "x",
            "at least [target: over the script with --bf16]",
        ),
        r"(\w+): over the script: (.+)": (r"\1: \2 is so many times as fast as the script", "x", ""),
        r"(\w+): defaults over: (.+)": (r"\1: the defaults are so many times as fast as \2", "x", ""),
        r"versions: (.+)": (r"Version of \1", "", ""),
    },
}


class Training(NamedTuple):
    """What both sides train on."""

    data: Path
    model: str
    questions: int
    tokens: float
    """Of a question with its context, on average."""


class Outcome(NamedTuple):
    """Seconds from start to a written model and its evaluation; the speed of the training; the score."""

    seconds: float
    rate: float
    f1: float


class Task(NamedTuple):
    """A public script beside a recipe: prepare the data, and each side by its name."""

    script: str
    recipe: str
    prepare: Callable[[Path], Training]
    words: tuple[str, ...]
    """Options of both sides."""
    switches: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]]
    """Name -> fields of the run and options of the recipe that take one default back."""


def _prepare_questions(folder: Path) -> Training:
    from transformers import AutoTokenizer

    questions = rounds(192, 32)
    _questions.write(folder / "data", questions, rounds(32, 16))
    model = str(demo_run("")["model"])
    rows = json.loads((folder / "data" / "train.json").read_text())["data"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    encoded = tokenizer([row["question"] for row in rows], [row["context"] for row in rows], verbose=False)
    return Training(folder / "data", model, questions, statistics.mean(map(len, encoded["input_ids"])))


# causal_lm beside language-modeling/run_clm.py is one more entry. There is no recipe for text classification.
TASKS: Final = {
    "question_answering": Task(
        script="question-answering/run_qa.py",
        recipe="question_answering",
        prepare=_prepare_questions,
        words=("--max_seq_length", "384", "--doc_stride", "128", "--learning_rate", "3e-4"),
        switches={
            "padded": ({}, ("--unpad", "false")),
            "padded, grouped by length": (
                {},
                ("--unpad", "false", "--train_sampling_strategy", "group_by_length"),
            ),
            "padded to 384": ({}, ("--unpad", "false", "--pad_to_max_length", "true")),
            "fp32": ({"dtype": "fp32"}, ()),
            "unfused AdamW": ({}, ("--optim", "adamw_torch")),
            "gloo": ({"backend": "gloo"}, ()),
        },
    ),
}


def main() -> dict[str, Any]:
    """Measure the rivals in turn, each with three seeds."""
    scripts = os.environ.get(SCRIPTS)
    if not scripts:
        raise SkippedError("name the folder of the public scripts: python -m bench --scripts FOLDER finetune")
    figures: dict[str, Any] = {"versions": _versions(Path(scripts))}
    for name, task in TASKS.items():
        with tempfile.TemporaryDirectory(prefix="manycpu-bench-") as folder:
            figures[name] = _compare(task, Path(scripts) / task.script, Path(folder))
    return figures | {"target": TARGETS}


def _compare(task: Task, script: Path, folder: Path) -> dict[str, Any]:
    training = task.prepare(folder)
    public = partial(_public, task, script, training)
    own = partial(_own, task, training)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    sides: dict[str, Callable[[int, Path], Outcome]] = {
        "script": partial(public, torchrun),
        "script --bf16": partial(public, torchrun, "--bf16"),
        "manycpu": partial(own, {}),
    }
    if shutil.which("mpirun"):
        sides["script, mpirun"] = partial(public, [*_mpirun(), sys.executable])
    if not rounds(0, 1):
        sides |= {
            f"manycpu, {name}": partial(own, fields, *words)
            for name, (fields, words) in task.switches.items()
        }
    found: dict[str, list[Outcome]] = {name: [] for name in sides}
    for seed in range(rounds(3, 1)):
        for name, side in sides.items():
            with tempfile.TemporaryDirectory(dir=folder) as place:
                found[name].append(side(seed, Path(place)))
            print(f"  seed {seed}, {name}: {found[name][-1]}", flush=True)
    rates = {name: [outcome.rate for outcome in outcomes] for name, outcomes in found.items()}
    # Rates: how many times as fast the first of two is.
    return {
        "samples": training.questions,
        "seconds": {name: spread([each.seconds for each in found[name]]) for name in found},
        "samples/s": {name: spread(rates[name]) for name in found},
        "tokens/s": {name: spread([rate * training.tokens for rate in rates[name]]) for name in found},
        "f1": {name: spread([each.f1 for each in found[name]]) for name in found},
        "over the script": {name: ratio(rates[name], rates["script"]) for name in found if name != "script"},
        "over the script with --bf16": {"manycpu": ratio(rates["manycpu"], rates["script --bf16"])},
        "defaults over": {
            name.removeprefix("manycpu, "): ratio(rates["manycpu"], rates[name])
            for name in found
            if name.startswith("manycpu, ")
        },
    }


def _mpirun() -> list[str]:
    shown = subprocess.run(["mpirun", "--version"], check=False, capture_output=True, text=True).stdout
    open_mpi = ["--allow-run-as-root"] if "Open MPI" in shown else []
    return ["mpirun", *open_mpi, "-n", str(RANKS)]


def _public(task: Task, script: Path, training: Training, launch: list[str], *more: Any) -> Outcome:
    """Run the public script as its tutorial does: on CPUs, over gloo."""
    *options, seed, place = more
    _write_metric(place)
    words = [
        *("--model_name_or_path", training.model, "--do_train", "--do_eval", "--use_cpu"),
        *("--train_file", str(training.data / "train.json")),
        *("--validation_file", str(training.data / "validation.json")),
        *("--output_dir", str(place / "model"), "--ddp_backend", "gloo", "--report_to", "none"),
        *(*task.words, *_common(seed), *options),
    ]
    env = {"HF_HOME": str(place / "huggingface"), "PYTHONPATH": _path(), "MASTER_ADDR": "127.0.0.1"}
    began = time.perf_counter()
    _run([*launch, str(script), *words], place, env | {"MASTER_PORT": "29611"})
    return _outcome(place / "model" / "all_results.json", began)


def _own(task: Task, training: Training, fields: dict[str, Any], *more: Any) -> Outcome:
    """Run the recipe with its defaults but for the fields and options given."""
    *options, seed, place = more
    run = {
        "program": task.recipe,
        "args": [*task.words, *_common(seed), "--evaluate_before", "false", *options],
        "data": str(training.data),
        "model": training.model,
        "output": str(place / "model"),
        "nproc_per_node": RANKS,
        **fields,
    }
    (place / "run.yaml").write_text(json.dumps({"run": run, "target": {"kind": "local"}}))
    began = time.perf_counter()
    words = ["from manycpu.pipeline.cli import main; main()", "run", str(place / "run.yaml")]
    _run([sys.executable, "-c", *words], place, {"PYTHONPATH": _path(), "MANYCPU_HOME": str(place / "home")})
    return _outcome(place / "model" / "all_results.json", began)


def _common(seed: int) -> tuple[str, ...]:
    return (
        *("--per_device_train_batch_size", str(BATCH), "--num_train_epochs", "1"),
        *("--seed", str(seed), "--save_strategy", "no"),
    )


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT / ".dev"), os.environ.get("PYTHONPATH"))))


def _run(words: list[str], place: Path, env: dict[str, str]) -> None:
    """Run to the end; the benchmark ends with what a failing command printed."""
    try:
        done = subprocess.run(
            words, check=False, capture_output=True, text=True, timeout=LIMIT, cwd=place,
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | env,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        sys.exit(f"bench: no end within {LIMIT:.0f} s: {' '.join(words)}")
    if done.returncode != 0:
        sys.exit(f"bench: {' '.join(words)} failed\n{(done.stdout + done.stderr)[-3000:]}")


def _outcome(results: Path, began: float) -> Outcome:
    seconds = time.perf_counter() - began
    found = json.loads(results.read_text())
    f1 = found["f1"] if "f1" in found else found["eval_f1"]
    return Outcome(round(seconds, 1), float(found["train_samples_per_second"]), float(f1))


def _write_metric(place: Path) -> None:
    """Write the metric that the script asks the package evaluate for, which would fetch it from the Hub."""
    (place / "squad").mkdir()
    (place / "squad" / "squad.py").write_text(_METRIC)


_METRIC: Final = """
import datasets
import evaluate
from manycpu.pipeline.recipes.question_answering.scoring import score

class Squad(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        answers = datasets.Sequence({"text": text, "answer_start": datasets.Value("int32")})
        columns = {
            "predictions": {"id": text, "prediction_text": text},
            "references": {"id": text, "answers": answers},
        }
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(columns))

    def _compute(self, predictions, references):
        answers = {each["id"]: each["prediction_text"] for each in predictions}
        return score(answers, {each["id"]: each["answers"]["text"] for each in references})
"""


def _versions(scripts: Path) -> dict[str, str]:
    """Say which versions the scripts are of: the least transformers that each asks for."""
    found = {}
    for task in TASKS.values():
        path = scripts / task.script
        if not path.exists():
            raise SkippedError(f"there is no {path}")
        asked = re.search(r'^check_min_version\("([^"]+)"\)', path.read_text(), re.MULTILINE)
        found[path.name] = f"of transformers {asked[1]} or later" if asked else "unknown"
    return found
