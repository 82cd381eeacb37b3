"""An unchanged script of the Hugging Face Trainer: the report has the results that it wrote to its output."""

from collections.abc import Callable
from pathlib import Path

import pytest

from manycpu.pipeline import train
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs.preflight import preflight

pytestmark = pytest.mark.usefixtures("home")
UNCHANGED = """
import sys
import torch
from transformers import Trainer, TrainingArguments

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, x, labels):
        return {"loss": ((self.linear(x)[:, 0] - labels) ** 2).mean()}

rows = [{"x": torch.tensor([n / 8]), "labels": torch.tensor(n / 4)} for n in range(8)]
args = TrainingArguments(
    output_dir=sys.argv[1], max_steps=4, logging_steps=1, save_steps=2, report_to=[],
    per_device_train_batch_size=2,
)
trainer = Trainer(model=Line(), args=args, train_dataset=rows, eval_dataset=rows)
trained = trainer.train()
trainer.save_model()
trainer.log_metrics("train", trained.metrics)
trainer.save_metrics("train", trained.metrics)
trainer.save_state()
found = trainer.evaluate()
trainer.save_metrics("eval", found)
"""


def test_the_report_has_what_the_trainer_wrote(script: Callable[..., str], tmp_path: Path) -> None:
    run = {"program": script(UNCHANGED), "args": ["{output}/model"], "output": str(tmp_path / "out")}
    report = train({**run, "nproc_per_node": 1})
    assert {"train_loss", "eval_loss", "train_runtime", "loss", "learning_rate"} <= report.metrics.keys()
    assert report.progress is not None
    assert (report.progress.step, report.progress.total_steps) == (4, 4)
    assert report.series["loss"].steps == [1, 2, 3, 4]
    assert not (tmp_path / "out" / "metrics.json").exists(), (
        "nothing is added to an unchanged script's output"
    )


@pytest.mark.usefixtures("light_torch")
def test_what_a_script_tells_by_itself_is_all_that_counts(script: Callable[..., str], tmp_path: Path) -> None:
    text = """
import json, os
from manycpu.pipeline.node.metrics import metrics
metrics({"mine": 1})
json.dump({"eval_loss": 2.0}, open(os.environ["MANYCPU_OUTPUT"] + "/all_results.json", "w"))
"""
    run = {"program": script(text), "output": str(tmp_path / "out"), "nproc_per_node": 1}
    assert train(run).metrics == {"mine": 1}


@pytest.mark.usefixtures("light_torch")
@pytest.mark.parametrize(
    "content", ["{", "[1]", '{"log_history": 3}', '{"log_history": [1], "global_step": "x"}'], ids=range(4)
)
def test_files_of_the_same_names_that_are_others_end_no_training(
    script: Callable[..., str], tmp_path: Path, content: str
) -> None:
    text = f"""
import os
for name in ("all_results.json", "trainer_state.json"):
    open(os.environ["MANYCPU_OUTPUT"] + "/" + name, "w").write({content!r})
"""
    run = {"program": script(text), "output": str(tmp_path / "out"), "nproc_per_node": 1}
    assert train(run).state == "succeeded"


@pytest.mark.parametrize(
    ("text", "args", "where"),
    [
        ("torch.save(model, 'model.pt')", [], "'model.pt' (line 1)"),
        ("model.save_pretrained('out')", [], "'out' (line 1)"),
        ("open('log.txt', mode='a')", [], "'log.txt' (line 1)"),
        ("from pathlib import Path\nPath('a.txt').write_text('x')", [], "'a.txt' (line 2)"),
        ("TrainingArguments(output_dir='./out')", [], "'./out' (line 1)"),
        ("parser.add_argument('--output_dir', default='.')", [], "'.' (line 1)"),
        (
            "parser.add_argument('--output_dir', default='.')",
            ["--output_dir", "there"],
            "'there' (--output_dir)",
        ),
        ("", ["--output-dir=there"], "'there' (--output-dir)"),
        ("parser.add_argument('--output_dir', default='.')", ["--output_dir", "/there"], None),
        ("open('log.txt')\nopen('/tmp/x', 'w')\nlogger.save()", ["--output_dir"], None),
    ],
)
def test_what_goes_with_the_run_is_told_before(
    script: Callable[..., str], tmp_path: Path, text: str, args: list[str], where: str | None
) -> None:
    run = {"program": script(text), "args": args, "output": None}
    found = preflight(open_context(run, None, tmp_path, base=tmp_path))
    told = [finding for finding in found if finding.field == "run.output"]
    assert [finding.fatal for finding in told] == ([False] if where else [])
    if where:
        assert (
            f"train.py writes to {where}, in its working folder, which goes with the run" in told[0].message
        )
