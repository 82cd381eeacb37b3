"""Settings of an Airflow of its own on this machine, for ``make demo``, ``make ui`` and the tests."""

import json
import os
import sys
import uuid
from contextlib import suppress
from pathlib import Path

__all__ = ["DAGS", "configure", "home", "instance", "settings"]

DAGS = Path(__file__).resolve().parents[1] / "dags"


def home() -> Path:
    """Find the folder of the embedded Airflow: $AIRFLOW_HOME, or ``.airflow`` here."""
    return Path(os.environ.get("AIRFLOW_HOME") or ".airflow").absolute()


def configure(home: Path, port: int = 8080, **more: str) -> None:
    """Configure this process and its children for the embedded Airflow; variables already set win."""
    home.mkdir(parents=True, exist_ok=True)
    variables = settings(home, port) | {"AIRFLOW__MANYCPU__INSTANCE": instance(home)} | more
    os.environ.update({name: os.environ.get(name, value) for name, value in variables.items()})
    # `airflow standalone` starts its parts as `airflow`, which is beside this Python.
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"


def settings(home: Path, port: int = 8080, dags: dict[str, Path] | None = None) -> dict[str, str]:
    """Return the environment variables of an Airflow on loopback that keeps everything in one folder.

    ``dags`` are folders of DAGs by the name of their bundle; by default those of this package.
    """
    bundles = [
        {
            "name": name,
            "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
            "kwargs": {"path": str(folder), "refresh_interval": 5},
        }
        for name, folder in (dags or {"manycpu": DAGS}).items()
    ]
    url = f"http://127.0.0.1:{port}"
    options: dict[str, dict[str, object]] = {
        "api": {"host": "127.0.0.1", "port": port, "base_url": url, "workers": 1},
        "core": {
            "execution_api_server_url": f"{url}/execution/",
            "load_examples": False,
            "dags_are_paused_at_creation": False,
            "parallelism": 8,
            "lazy_load_plugins": True,
        },
        "dag_processor": {
            "dag_bundle_config_list": json.dumps(bundles),
            "refresh_interval": 5,
            "min_file_process_interval": 300,  # a changed file is parsed at once
        },
        "logging": {"logging_level": "INFO"},
        "usage_data_collection": {"enabled": False},
        # The most seconds until a worker notices that a person has ended its task.
        "workers": {"min_heartbeat_interval": 1},
    }
    return {
        "AIRFLOW_HOME": str(home),
        "PYTHONUNBUFFERED": "1",
        "MANYCPU_HOME": str(home / "manycpu"),
        **{
            f"AIRFLOW__{section}__{option}".upper(): str(value)
            for section, chosen in options.items()
            for option, value in chosen.items()
        },
    }


def instance(home: Path) -> str:
    """Return a name that tells this Airflow from every other: generated once, and kept in its folder."""
    name, partial = home / "instance", home / f".instance.{os.getpid()}"
    if not name.exists():
        partial.write_text(uuid.uuid4().hex)
        with suppress(FileExistsError):
            os.link(partial, name)  # atomic, and keeps the file that another process linked first
        partial.unlink()
    return name.read_text()
