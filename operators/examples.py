"""What the example DAGs train: the demo's run, with the data and the checkpoint of the extra ``demo``."""

import os
import shlex
from typing import Any


def example_run(name: str) -> dict[str, Any]:
    """Return the fields of a run that fine-tunes in a minute on two cores; each DAG run has its own output.

    ``name`` is the name of the folder for these outputs. If the extra ``demo`` is not installed, the fields
    name no model: Airflow can still parse the DAG, and the task prepare fails.
    """
    from manycpu.pipeline.recipes.question_answering.demo import DATA, demo_run
    from manycpu.pipeline.spec.errors import BadInputError
    from manycpu.pipeline.targets.context import home

    # Airflow renders this for each DAG run. The path of the output has no `:` and no `+`.
    run_id_template = "{{ run_id | replace(':', '') | replace('+', '_') }}"
    output = str(home() / "models" / name / run_id_template)
    try:
        return demo_run(output)
    except BadInputError:
        return {"program": "question_answering", "data": str(DATA), "output": output}


def form_defaults(folder: os.PathLike[str]) -> dict[str, Any]:
    """Return defaults of a trigger form: the demo's run, with paths relative to ``folder``, the DAG file's.

    The mapping is empty if the extra ``demo`` is not installed.
    """
    from manycpu.pipeline.recipes.question_answering.demo import demo_run
    from manycpu.pipeline.spec.errors import BadInputError

    try:
        run = demo_run("")  # the form leaves the output empty
    except BadInputError:
        return {}
    dag_folder = os.path.realpath(folder)  # ".." in a relative path leaves a link's target, not the link
    paths = {name: os.path.relpath(os.path.realpath(run[name]), dag_folder) for name in ("data", "model")}
    fields = {name: run[name] for name in ("program", "nproc_per_node", "dtype")}
    return {**fields, **paths, "args": shlex.join(run["args"])}


def language_runs(folder: str, ranks: int, steps: int) -> dict[str, dict[str, Any]]:
    """Write the data and the model's configuration of the example `language_model`; return its two runs.

    Args:
        folder: Folder for the data, the configuration and the models.
        ranks: Processes of each run.
        steps: Training steps of each run.

    Returns:
        The fields of the runs ``pretrain`` and ``finetune``.
    """
    from manycpu.pipeline.recipes.causal_lm import generate

    generate.main(folder)
    common = {"program": "causal_lm", "nproc_per_node": ranks, "oversubscribe": True}
    args = ["--max_steps", str(steps), "--per_device_train_batch_size", "1", "--learning_rate", "3e-3"]
    args += ["--max_seq_length", "512", "--save_total_limit", "1", "--max_eval_samples", "100"]
    base = f"{folder}/base"
    return {
        "pretrain": {
            **common,
            "data": f"{folder}/texts",
            "model": f"{folder}/model",
            "output": base,
            "args": [*args, "--method", "full", "--from_scratch", "True"],
        },
        "finetune": {
            **common,
            "data": f"{folder}/questions",
            "model": base,
            "output": f"{folder}/answers",
            "args": [*args, "--method", "lora", "--lora_target_modules", "q_proj", "v_proj", "down_proj"],
        },
    }
