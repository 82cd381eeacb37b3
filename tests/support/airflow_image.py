"""An image in the shape of Airflow's official one: Debian, databases, Airflow, and manycpu's wheel on top.

All pods of an Airflow use this one image, so that nodes pull only one. The wheel is alone in the last, small
layer: after a change of manycpu, only that layer is new.
"""

import inspect
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from cluster import images, layers
from cluster.command import run
from cluster.go import uv
from cluster.registry import Layer
from cluster.settings import PROJECT
from support import builder_image, registry_images
from support.builder_image import Builder

from manycpu.pipeline.targets.kubernetes.image.layers import Tree, tree

USER: Final = 50000
HOME: Final = "opt/airflow"
VENV: Final = "opt/venv"
EXTRAS: Final = ("airflow", "kubernetes")
"""The extras of manycpu that workers and triggerers need."""
DRIVERS: Final = (
    "apache-airflow-providers-postgres==7.1.1",
    "asyncpg==0.32.0",
    "apache-airflow-providers-celery==3.26.0",
    "celery==5.6.3",  # the provider allows 5.7, and cannot import it
    "apache-airflow-providers-git==1.0.1",
    "apache-airflow-providers-amazon==9.39.0",
)
"""What the official image has for PostgreSQL, CeleryExecutor, DAGs from git and logs on S3."""
PACKAGES: Final = ("ca-certificates", "git", "postgresql", "python3", "redis-server")
_INSTALL_SECONDS: Final = 1200


def reference() -> str:
    """Return the image's reference with its digest; build and push the layers that the registry lacks."""
    content = inspect.getsource(_airflow) + inspect.getsource(_compile)
    made_from = " ".join([*layers.pins(EXTRAS), *DRIVERS, content])
    path = images.PATH.replace("PATH=", f"PATH=/{VENV}/bin:")
    env = [path, f"AIRFLOW_HOME=/{HOME}", f"HOME=/{HOME}", "PYTHONUNBUFFERED=1", "LANG=C.UTF-8"]
    config = {"Env": env, "User": f"{USER}:0", "WorkingDir": f"/{HOME}"}
    airflow = builder_image.published("airflow", Builder(PACKAGES, config, _airflow, made_from))
    wheel = _wheel()
    return registry_images.with_layer(airflow, wheel.layer, wheel.digest[:12])


def _airflow(root: Path, workshop: Path) -> list[Layer]:  # noqa: ARG001 - all goes into the root folder
    """Install Airflow into a virtual environment, and make the user's home."""
    venv = root / VENV
    run([uv(), "venv", "--quiet", "--relocatable", "--python", layers.SYSTEM_PYTHON, venv])
    wanted = [*layers.pins(EXTRAS)[:-1], *DRIVERS]
    options = ["--quiet", "--python", str(venv / "bin" / "python")]
    options += ["--constraint", str(PROJECT / "requirements" / "all.txt")]
    run([uv(), "pip", "install", *options, *wanted], seconds=_INSTALL_SECONDS)
    _compile(root, venv)
    with (root / "etc" / "passwd").open("a") as users:
        users.write(f"airflow:x:{USER}:0::/{HOME}:/bin/bash\n")
    home, dags = root / HOME, root / HOME / "dags"
    dags.mkdir(parents=True)
    (dags / "manycpu").symlink_to(f"/{_packages(Path(VENV))}/manycpu/dags")
    # The users of Airflow's simple auth manager, which has to be able to write it.
    (home / "simple_auth_manager_passwords.json.generated").write_text('{"admin": "admin"}')
    for path in (home, dags, *home.iterdir()):
        os.chown(path, USER, 0)
    return []


def _packages(venv: Path) -> Path:
    return venv / "lib" / f"python{layers.PYTHON[layers.suite()]}" / "site-packages"


def _compile(root: Path, folder: Path) -> None:
    """Write the bytecode, by the content of files: those of layers have other times."""
    options = ["-qq", "-j", "0", "--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", "/"]
    command = [layers.SYSTEM_PYTHON, "-m", "compileall", *options, str(folder)]
    subprocess.run(command, check=False, timeout=_INSTALL_SECONDS)  # templates of packages are no Python


def _wheel() -> Tree:
    """Build the wheel of this checkout, and unpack it where Airflow's Python finds it, as pip does."""
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
        run(build, cwd=PROJECT)
        root = Path(folder) / "root"
        packages = root / _packages(Path(VENV))
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            wheel.extractall(packages)
        _compile(root, packages)
        files = (path for path in root.rglob("*") if path.is_file())
        return tree(((f"/{path.relative_to(root)}", path) for path in files), "wheel", None)
