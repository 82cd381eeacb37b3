"""The metadata of this provider for Airflow: the entry point ``apache_airflow_provider``."""

from typing import Any

_NAME = "manycpu"
_LIVE_SECONDS = (
    "Minimum seconds between two updates of a training's page while it runs: each is an XCom of its task. "
    "0: no update is written, and the page shows the report when the run has ended."
)
_INSTANCE = (
    "A name that tells this Airflow from others that train on the same machines: part of every run's key. "
    "The same on every worker. Default: `[api] base_url` if it is no loopback address, otherwise "
    "$AIRFLOW_HOME. "
    "Targets other than local need this option, or a public `[api] base_url`: other Airflows reach them too."
)


def get_provider_info() -> dict[str, Any]:
    """Return the provider's metadata, in Airflow's schema."""
    operators = ["manycpu.operators.steps", "manycpu.operators.train"]
    triggers = ["manycpu.operators.job_trigger", "manycpu.operators.triggers"]
    return {
        "package-name": _NAME,
        "name": "Many CPUs",
        "description": "Train and fine-tune PyTorch models on many CPUs.",
        "integrations": [
            {
                "integration-name": _NAME,
                "external-doc-url": "https://pytorch.org/docs/stable/distributed.html",
                "tags": ["software"],
            }
        ],
        "operators": [{"integration-name": _NAME, "python-modules": operators}],
        "triggers": [{"integration-name": _NAME, "python-modules": triggers}],
        "extra-links": ["manycpu.operators.base.TrainingLink"],
        "task-decorators": [{"name": _NAME, "class-name": "manycpu.operators.decorator.manycpu_task"}],
        "config": {
            _NAME: {
                "description": "Settings of manycpu.",
                "options": {
                    "instance": {
                        "description": _INSTANCE,
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": "team-a",
                        "default": "",
                    },
                    "live_seconds": {
                        "description": _LIVE_SECONDS,
                        "version_added": "0.1.0",
                        "type": "float",
                        "example": "60",
                        "default": "15",
                    },
                },
            }
        },
    }
