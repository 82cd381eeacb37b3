"""Fine-tune a language model by LoRA, on four processes.

`language_model` needs no network: it trains a small Llama, made from its configuration, on texts, and then an
adapter of it on questions about such texts. `medical_language_model` is the same with names: Llama 2 7B and a
medical question set of the Hub, over four nodes. See docs/language_models.md.
"""

from typing import Any

from airflow.sdk import Param, dag, task

from manycpu.operators import training_pipeline

TAGS = ["manycpu", "example"]


@dag(
    schedule=None,
    params={
        "ranks": Param(4, type="integer", minimum=1, description="Processes of each training."),
        "steps": Param(100, type="integer", minimum=1, description="Steps of each training."),
        "folder": Param(
            None,
            type=["null", "string"],
            pattern="^(/|$)",
            description="Where data and models go: an absolute path. Left empty: models/language, in "
            "$MANYCPU_HOME.",
        ),
    },
    tags=TAGS,
    doc_md=__doc__,
)
def language_model() -> None:
    @task(multiple_outputs=True)
    def begin(params: Any = None, run_id: Any = None) -> dict[str, Any]:
        """Write the data, and return the fields of the runs `pretrain` and `finetune`."""
        from manycpu.operators.examples import language_runs
        from manycpu.pipeline.targets.context import home

        # The id mostly holds a time, such as 00:00:00+00:00: the folder's name gets neither ":" nor "+".
        name = run_id.replace(":", "").replace("+", "_")
        folder = params["folder"] or str(home() / "models" / "language" / name)
        return language_runs(folder, params["ranks"], params["steps"])

    runs: Any = begin()
    pretrain = training_pipeline(run=runs["pretrain"], group_id="pretrain")
    finetune = training_pipeline(run=runs["finetune"], group_id="finetune")
    pretrain >> finetune


@dag(
    schedule=None,
    params={
        "data": Param(
            "hf://datasets/medalpaca/medical_meadow_medical_flashcards",
            type="string",
            description="Questions and answers, in the columns input and output.",
        ),
        "model": Param("hf://meta-llama/Llama-2-7b-chat-hf", type="string", description="The base model."),
        "output": Param(type="string", minLength=1, description="Folder or URL for the model."),
        "target": Param({"kind": "local"}, type="object", description="Where it trains."),
    },
    tags=TAGS,
    doc_md=__doc__,
)
def medical_language_model() -> None:
    @task(multiple_outputs=True)
    def begin(params: Any = None) -> dict[str, Any]:
        """Return the fields of the run, and the target, from the parameters."""
        run = {
            "program": "causal_lm",
            "data": params["data"],
            "model": params["model"],
            "output": params["output"],
            "nnodes": 1 if params["target"]["kind"] == "local" else 4,  # `local` is one machine
            "dtype": "bf16",
            "args": [
                *("--prompt_column", "input", "--completion_column", "output", "--max_seq_length", "512"),
                *("--lora_r", "8", "--lora_alpha", "16", "--lora_target_modules", "q_proj", "v_proj"),
                *("--per_device_train_batch_size", "8", "--learning_rate", "1e-4"),
                *("--num_train_epochs", "3", "--activation_checkpointing", "True"),
            ],
        }
        return {"run": run, "target": params["target"]}

    run_and_target: Any = begin()
    training_pipeline(run=run_and_target["run"], target=run_and_target["target"])


language_model()
medical_language_model()
