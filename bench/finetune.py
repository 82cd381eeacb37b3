"""Whole fine-tunings, from start to a written model: public scripts beside `manycpu run` of the same.

Nothing of the scripts is here. ``--scripts FOLDER`` names transformers' ``examples/pytorch``, with a folder
``accelerate`` for Accelerate's ``cv_example.py``. They need the package ``evaluate``. The results name their
versions; a script that is not there is left out.
"""

import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import _questions
from bench._measure import SkippedError, ratio, rounds, spread
from manycpu.pipeline.recipes.question_answering.demo import demo_run

SCRIPTS: Final = "MANYCPU_BENCH_SCRIPTS"
ROOT: Final = Path(__file__).parents[1]
RANKS: Final = 2
LIMIT: Final = 1800.0  # seconds
TARGETS: Final = {
    "over the script, without AMX": 3.3,
    "over the script, with AMX": 4,
    "over the script with --bf16": 2.5,
    "points of F1 lost": 0.5,
    "causal_lm over the script": 2.5,
}
WORDS = {
    "title": "A whole fine-tuning",
    "meaning": "The same data, model, epochs, batch and seeds take a fraction of the public script's time "
    "by the recipes' defaults, mostly by not computing on padding.",
    "figures": {
        r"(\w+): samples": (r"\1: questions, documents or images of a training", "", ""),
        r"(\w+): seconds: (.+)": (r"\1: from start to a written model, \2", "s", ""),
        r"(\w+): samples/s: (.+)": (r"\1: speed of the training, \2", "samples/s", ""),
        r"(\w+): tokens/s: (.+)": (r"\1: speed without padding, \2", "tokens/s", ""),
        r"(\w+): (f1|eval_loss|eval_accuracy): (.+)": (r"\1: \2, \3", "", ""),
        r"question_answering: over the script: manycpu": (
            "question_answering: the recipe's defaults train so many times as fast as the script's",
            "x",
            "at least [target: over the script, without AMX], with AMX [target: over the script, with AMX]",
        ),
        r"question_answering: over the script with --bf16: manycpu": (
            "question_answering: and so many times as fast as the script with --bf16",
            "x",
            "at least [target: over the script with --bf16]",
        ),
        r"causal_lm: over the script: manycpu": (
            "causal_lm: the recipe's defaults train so many times as fast as the script's",
            "x",
            "at least [target: causal_lm over the script]",
        ),
        r"(\w+): over the script: (.+)": (r"\1: \2 is so many times as fast as the script", "x", ""),
        r"(\w+): over the script with --bf16: (.+)": (
            r"\1: \2 is so many times as fast as the script with --bf16",
            "x",
            "",
        ),
        r"(\w+): defaults over: (.+)": (r"\1: the defaults are so many times as fast as \2", "x", ""),
        r"versions: (.+)": (r"Version of \1", "", ""),
    },
}


class Training(NamedTuple):
    """What both sides train on."""

    data: Path
    model: str
    samples: int
    tokens: float = 0.0
    """Of a sample, on average; 0: it has none."""


class Outcome(NamedTuple):
    """Seconds from start to a written model and its evaluation; samples a second; the score."""

    seconds: float
    rate: float
    score: float


class Turn(NamedTuple):
    """One training of a side."""

    training: Training
    seed: int
    place: Path
    """A folder for all that it writes."""


class Task(NamedTuple):
    """A public script beside a recipe. In options stand {data}, {model}, {seed} and {output}."""

    script: str
    program: str
    """The recipe; empty: `manycpu run` runs the script."""
    prepare: Callable[[Path, int], Training]
    samples: int
    score: str
    """The metric's name in ``all_results.json``; empty: none is written there, and the whole time counts."""
    both: str
    public: str
    own: str
    bf16: str = "--bf16"
    """What switches the script to bf16."""
    switches: Mapping[str, tuple[dict[str, Any], str]] = {}
    """Name -> fields of the run and options of the recipe that take one default back."""
    learning: tuple[int, str, str] = (0, "", "")
    """Samples from which the model learns enough for a score, options of both sides for that, and the
    script's options that spare time."""


def _questions_of(folder: Path, count: int) -> Training:
    _questions.write(folder, count, max(16, count // 6))
    model = str(demo_run("")["model"])
    texts = [(row["question"], row["context"]) for row in _rows(folder)]
    return Training(folder, model, count, _tokens(model, texts))


def _documents(folder: Path, count: int) -> Training:
    """Write texts of the questions' lengths, and a small Llama with BERT's vocabulary."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed

    _questions.write(folder, count, max(16, count // 6))
    for split in ("train", "validation"):
        texts = [row["context"] for row in _rows(folder, split)]
        (folder / f"{split}.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    marks: dict[str, Any] = {"bos_token": "[CLS]", "eos_token": "[SEP]", "model_max_length": 1024}
    tokenizer = AutoTokenizer.from_pretrained(str(demo_run("")["model"]), **marks)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=1024,
    )
    model = folder.with_name(f"{folder.name}-model")
    for part in (tokenizer, LlamaForCausalLM(config)):
        part.save_pretrained(model)
    contexts = [json.loads(line)["text"] for line in (folder / "train.json").open()]
    return Training(folder, str(model), count, _tokens(str(model), [(text,) for text in contexts]))


def _pairs(folder: Path, count: int) -> Training:
    """Write questions, each with a text and whether it answers the question."""
    made = _questions_of(folder, count)
    for split in ("train", "validation"):
        rows = _rows(folder, split)
        texts = [row["context"] for row in rows]
        pairs = [
            {"sentence1": row["question"], "sentence2": texts[at - at % 2], "label": int(at % 2 == 0)}
            for at, row in enumerate(rows)
        ]
        (folder / f"{split}.json").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return made


def _photos(folder: Path, count: int) -> Training:
    """Write pictures of a photo's size, of four classes."""
    from PIL import Image

    folder.mkdir()
    for number in range(count):
        rng = random.Random(number)  # noqa: S311 - no secret
        coarse = Image.frombytes("RGB", (20, 15), rng.randbytes(900))
        coarse.resize((500, 375)).save(folder / f"class{number % 4}_{number}.jpg")
    return Training(folder, "", count)


def _rows(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / f"{split}.json").read_text())["data"]
    return rows


def _tokens(model: str, texts: Sequence[tuple[str, ...]]) -> float:
    """Count the tokens of a sample, on average."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return statistics.mean(len(tokenizer(*text, verbose=False)["input_ids"]) for text in texts)


_TRAINER: Final = (
    "--do_train --do_eval --use_cpu --ddp_backend gloo --report_to none --model_name_or_path {model}"
    " --train_file {data}/train.json --validation_file {data}/validation.json --output_dir {output}"
)
_EPOCH: Final = "--num_train_epochs 1 --seed {seed} --save_strategy no --learning_rate 3e-4"
_TORCHRUN: Final = [
    *(sys.executable, "-m", "torch.distributed.run"),
    *("--standalone", f"--nproc-per-node={RANKS}"),
]
TASKS: Final = {
    "question_answering": Task(
        script="question-answering/run_qa.py",
        program="question_answering",
        prepare=_questions_of,
        samples=192,
        score="f1",
        both=f"{_EPOCH} --per_device_train_batch_size 8 --max_seq_length 384 --doc_stride 128",
        public=_TRAINER,
        own="--evaluate_before false",
        switches={
            "padded": ({}, "--unpad false"),
            "padded, grouped by length": (
                {},
                "--unpad false --train_sampling_strategy group_by_length",
            ),
            "padded to 384": ({}, "--unpad false --pad_to_max_length true"),
            "fp32": ({"dtype": "fp32"}, ""),
            "unfused AdamW": ({}, "--optim adamw_torch"),
            "gloo": ({"backend": "gloo"}, ""),
        },
        learning=(1200, "--lr_scheduler_type cosine", "--pad_to_max_length false"),
    ),
    "causal_lm": Task(
        script="language-modeling/run_clm.py",
        program="causal_lm",
        prepare=_documents,
        samples=400,
        score="eval_loss",
        both=f"{_EPOCH} --per_device_train_batch_size 2",
        public=_TRAINER,
        own="--method full --samples 0",
        switches={
            "padded": ({}, "--packing false --per_device_train_batch_size 13"),
            "fp32": ({"dtype": "fp32"}, ""),
        },
    ),
    "text_classification": Task(
        script="text-classification/run_glue.py",
        program="",  # no recipe: the script gains what any script does
        prepare=_pairs,
        samples=192,
        score="eval_accuracy",
        both=f"{_EPOCH} --per_device_train_batch_size 8",
        public=_TRAINER,
        own=f"{_TRAINER} --bf16".replace("--ddp_backend gloo ", ""),
    ),
    "image_classification": Task(
        script="accelerate/cv_example.py",
        program="image_classification",
        prepare=_photos,
        samples=160,
        score="",
        both="--data_dir {data}",
        public="--cpu",
        own="--num_epochs 3",
        bf16="--mixed_precision bf16",
        switches={"fp32": ({"dtype": "fp32"}, "")},
    ),
}


def main() -> dict[str, Any]:
    """Measure the rivals in turn with three seeds, then each switch with one."""
    scripts = os.environ.get(SCRIPTS)
    if not scripts:
        raise SkippedError("name the folder of the public scripts: python -m bench --scripts FOLDER finetune")
    from support import hub_cache

    figures: dict[str, Any] = {"versions": _versions(Path(scripts))}
    with tempfile.TemporaryDirectory(prefix="manycpu-bench-") as folder:
        hub_cache.fill(Path(folder, "hub"))  # a metric, and resnet50d with random weights
        os.environ.update(hub_cache.environment(Path(folder, "hub")))
        chosen = {name: task for name, task in TASKS.items() if (Path(scripts) / task.script).exists()}
        for name, task in chosen.items():
            figures[name] = _compare(task, Path(scripts) / task.script, Path(folder, name))
        for name, task in chosen.items():
            if task.learning[0] and not rounds(0, 1):
                own = Path(folder, f"{name}-learning")
                figures[name][task.score] = _learn(task, Path(scripts) / task.script, own)
    return figures | {"target": TARGETS}


def _compare(task: Task, script: Path, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    training = task.prepare(folder / "data", rounds(task.samples, task.samples // 6))
    public, own = partial(_public, task, script), partial(_own, task, script)
    sides: dict[str, Callable[[Turn], Outcome]] = {
        "script": partial(public, _TORCHRUN, ""),
        "script --bf16": partial(public, _TORCHRUN, task.bf16),
        "manycpu": partial(own, {}, ""),
    }
    found = _by_turns(sides, training, folder)
    if not rounds(0, 1):
        others = {f"manycpu, {name}": partial(own, *given) for name, given in task.switches.items()}
        if shutil.which("mpirun") and task.learning[0]:
            others["script, mpirun"] = partial(public, [*_mpirun(), sys.executable], "")
        found |= _by_turns(others, training, folder, seeds=1)
    return _figures(task, training, found)


def _figures(task: Task, training: Training, found: Mapping[str, list[Outcome]]) -> dict[str, Any]:
    rates = {name: [outcome.rate for outcome in outcomes] for name, outcomes in found.items()}
    rivals = [name for name in found if not name.startswith("manycpu, ")]

    def over(name: str, other: str) -> dict[str, float]:
        """Say how many times as fast the first is, by the turns that both had."""
        return ratio(*zip(*zip(rates[name], rates[other], strict=False), strict=True))

    figures = {
        "samples": training.samples,
        "seconds": {name: spread([each.seconds for each in found[name]]) for name in found},
        "samples/s": {name: spread(rates[name]) for name in found},
        "over the script": {name: over(name, "script") for name in rivals if name != "script"},
        "over the script with --bf16": {"manycpu": over("manycpu", "script --bf16")},
        "defaults over": {
            name.removeprefix("manycpu, "): over("manycpu", name)
            for name in found
            if name.startswith("manycpu, ")
        },
    }
    if training.tokens:
        figures["tokens/s"] = {
            name: spread([rate * training.tokens for rate in rates[name]]) for name in rivals
        }
    return figures | ({task.score: _scores(found)} if task.score else {})


def _learn(task: Task, script: Path, folder: Path) -> dict[str, Any]:
    """Train long enough for a score that says something, from the same head."""
    count, both, spared = task.learning
    sides: dict[str, Callable[[Turn], Outcome]] = {
        "script": partial(_public, task, script, _TORCHRUN, f"{both} {spared}"),
        "manycpu": partial(_own, task, script, {}, both),
    }
    folder.mkdir()
    training = task.prepare(folder / "data", count)
    training = training._replace(model=_with_head(training.model, folder / "head"))
    return _scores(_by_turns(sides, training, folder))


def _with_head(model: str, folder: Path) -> str:
    """Write the model with a head of large random weights, which learns in few steps."""
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer, set_seed

    set_seed(0)
    changes: dict[str, Any] = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    head = AutoModelForQuestionAnswering.from_pretrained(model, initializer_range=0.3, **changes)
    for part in (head, AutoTokenizer.from_pretrained(model)):
        part.save_pretrained(folder)
    return str(folder)


def _scores(found: Mapping[str, list[Outcome]]) -> dict[str, Any]:
    return {name: spread([each.score for each in outcomes]) for name, outcomes in found.items()}


def _by_turns(
    sides: Mapping[str, Callable[[Turn], Outcome]], training: Training, folder: Path, seeds: int = 3
) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {name: [] for name in sides}
    for seed in range(rounds(seeds, 1)):
        for name, side in sides.items():
            with tempfile.TemporaryDirectory(dir=folder) as place:
                found[name].append(side(Turn(training, seed, Path(place))))
            print(f"  {folder.name}, seed {seed}, {name}: {found[name][-1]}", flush=True)
    return found


def _mpirun() -> list[str]:
    shown = subprocess.run(["mpirun", "--version"], check=False, capture_output=True, text=True).stdout
    open_mpi = ["--allow-run-as-root"] if "Open MPI" in shown else []
    return ["mpirun", *open_mpi, "-n", str(RANKS)]


def _public(task: Task, script: Path, launch: list[str], more: str, turn: Turn) -> Outcome:
    """Run the public script as its tutorial does: on CPUs, over gloo."""
    (turn.place / "squad").mkdir()  # the script fetches this metric from the Hub, if no folder has its name
    (turn.place / "squad" / "squad.py").write_text(_METRIC)
    words = [*launch, str(script), *_words(f"{task.public} {task.both} {more}", turn)]
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    return _measured(task, turn, words, rendezvous | {"HF_DATASETS_CACHE": str(turn.place / "datasets")})


def _own(task: Task, script: Path, fields: dict[str, Any], more: str, turn: Turn) -> Outcome:
    """Run the recipe with its defaults but for the fields and options given."""
    training, place = turn.training, turn.place
    run = {
        "program": task.program or str(script),
        "args": _words(f"{task.both} {task.own} {more}", turn, "{output}"),
        "data": str(training.data),
        "output": str(place / "model"),
        "nproc_per_node": RANKS,
        **({"model": training.model} if training.model else {}),
        **fields,
    }
    (place / "run.yaml").write_text(json.dumps({"run": run, "target": {"kind": "local"}}))
    command = "from manycpu.pipeline.cli import main; main()"
    words = [sys.executable, "-c", command, "run", str(place / "run.yaml")]
    return _measured(task, turn, words, {"MANYCPU_HOME": str(place / "home")})


def _words(options: str, turn: Turn, output: str = "") -> list[str]:
    training, seed, place = turn
    given = {"data": training.data, "model": training.model, "seed": seed}
    given["output"] = output or place / "model"
    return [word.format(**given) for word in options.split()]


def _measured(task: Task, turn: Turn, words: list[str], env: dict[str, str]) -> Outcome:
    """Run to the end; the benchmark ends with what a failing command printed."""
    paths = os.pathsep.join(filter(None, (str(ROOT / ".dev"), os.environ.get("PYTHONPATH"))))
    began = time.perf_counter()
    try:
        done = subprocess.run(
            words, check=False, capture_output=True, text=True, timeout=LIMIT, cwd=turn.place,
            env=os.environ | {"PYTHONPATH": paths} | env,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        sys.exit(f"bench: no end within {LIMIT:.0f} s: {' '.join(words)}")
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        sys.exit(f"bench: {' '.join(words)} failed\n{(done.stdout + done.stderr)[-3000:]}")
    if not task.score:
        return Outcome(round(seconds, 1), turn.training.samples / seconds, 0.0)
    found = json.loads((turn.place / "model" / "all_results.json").read_text())
    score = found.get(task.score, found.get(f"eval_{task.score}"))
    return Outcome(round(seconds, 1), turn.training.samples / found["train_runtime"], float(score))


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
        if path.exists():
            asked = re.search(r'^check_min_version\("([^"]+)"\)', path.read_text(), re.MULTILINE)
            found[path.name] = f"of transformers {asked[1]} or later" if asked else "unknown"
    if not found:
        raise SkippedError(f"{scripts} has none of {', '.join(task.script for task in TASKS.values())}")
    return found
