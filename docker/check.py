"""See that an image will do, while it is built: check.py python|helper|train."""

import importlib
import pwd
import re
import shutil
import sys

PYTHON, TORCH = (3, 11), (2, 6)
USER = 1000
BARE = ("click", "fsspec", "psutil", "pydantic", "rich", "yaml")
NEEDED = {
    "python": (),
    "helper": BARE,
    "train": (*BARE, "torch", "transformers", "datasets", "accelerate"),
}


def main(stage):
    """Name everything that is wrong; the exit code is what a build goes by."""
    wrong = list(_python()) or [*_modules(stage), *(_system() if stage == "train" else ())]
    for line in wrong:
        sys.stderr.write("manycpu: %s\n" % line)  # noqa: UP031 - a Python that is too old must be able to say so
    return 1 if wrong else 0


def _python():
    if sys.version_info[:2] < PYTHON:
        found = ".".join(str(part) for part in sys.version_info[:3])
        yield "the base image's python3 is %s; 3.11 or later is needed: choose another BASE_IMAGE" % found  # noqa: UP031


def _modules(stage):
    for name in NEEDED[stage]:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a broken library fails as it likes
            yield f"{name} cannot be imported: {type(error).__name__}: {error}"
            continue
        if name == "torch" and _version(module.__version__) < TORCH:
            found = module.__version__
            yield f"torch is {found}; 2.6 or later is needed: set TORCH, or choose another BASE_IMAGE"


def _system():
    for program in ("sshd", "ssh"):
        if not shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin"):
            yield f"there is no {program}, which MPI jobs need"
    try:
        pwd.getpwuid(USER)
    except KeyError:
        yield f"user {USER} has no name"


def _version(text):
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
