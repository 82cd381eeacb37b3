"""The images that the cluster's pods run: what each contains, and when it must be rebuilt.

An image's tag is the hash of its inputs, so an image is built once and later found in the registry.
"""

import hashlib
import inspect
import io
import shutil
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import gpu_code, image_store, layers, registry, settings
from cluster.command import log
from cluster.modules import Module, choose, chosen
from cluster.namespace import Namespace
from cluster.registry import Layer
from cluster.settings import cache

# Images with one file: name of the image -> component, and the program of that component in the image.
STATIC = {
    "pause": ("pause", "pause"),
    "training-operator": ("training-operator", "training-operator.v1"),
    "mpi-operator": ("mpi-operator", "mpi-operator"),
    "trainer": ("trainer", "trainer-controller-manager"),
    "jobset": ("trainer", "jobset"),
    "kueue": ("kueue", "kueue"),
}
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Image:
    """An image: its name, the hash of its inputs, and the function that makes its layers."""

    name: str
    tag: str
    config: dict[str, Any]
    make: Callable[[], Sequence[Layer]]

    @property
    def reference(self) -> str:
        return f"{settings.registry()}/{self.name}:{self.tag}"


def every(modules: dict[str, Module] | None = None) -> list[Image]:
    modules = modules or chosen()
    return [*(_static(name, modules[component]) for name, (component, _) in STATIC.items()), *debian()]


def names() -> list[str]:
    return [image.name for image in every()]


def reference(name: str) -> str:
    """Return the reference by which a pod pulls an image: base, torch, helper, pause or an operator."""
    return next(image.reference for image in every() if image.name == name)


def built() -> bool:
    """Return whether the large images exist unpacked. The registry need not run for this check."""
    return image_store.there(_stored())


def ensure(namespace: Namespace) -> None:
    """Build and push the images that the cluster's registry lacks; unpack the large ones for the nodes."""
    publish(every())
    image_store.ensure(namespace, _stored())


def _stored() -> list[str]:
    """Return the images that nodes have from the start; they pull the operators' images, which are small."""
    return [image.reference for image in (_static("pause", choose("pause")), *debian())]


def publish(images: Sequence[Image]) -> None:
    """Build and push the given images that the registry lacks."""
    missing = [image for image in images if registry.digest(image.name, image.tag) is None]
    if not missing:
        return
    shutil.rmtree(_workshop(), ignore_errors=True)
    for image in missing:
        log.info("making image %s", image.name)
        _workshop().mkdir(parents=True, exist_ok=True)
        registry.push(image.name, image.tag, image.make(), image.config)
        log.info("made image %s: %.0f MB", image.name, registry.size(image.name, image.tag) / 1e6)
    shutil.rmtree(_workshop(), ignore_errors=True)


def _workshop() -> Path:
    return cache() / "images.part"


def _static(name: str, module: Module) -> Image:
    _, program = STATIC[name]

    def make() -> list[Layer]:
        return [registry.gzip_layer(_tar(module.program(program), program), _workshop() / f"{name}.tar.gz")]

    return Image(name, f"{module.minor}-{module.digest()}", {"Entrypoint": [f"/{program}"]}, make)


def _tar(program: Path, name: str) -> bytes:
    """Return a tar with one program in it, always the same bytes."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size, info.mode = program.stat().st_size, 0o755
        with program.open("rb") as content:
            tar.addfile(info, content)
    return stream.getvalue()


def debian() -> list[Image]:
    """Return the base image with Python and ssh, and the helper and training images, which extend it."""
    config: dict[str, Any] = {"Env": [PATH, "PYTHONUNBUFFERED=1", "LANG=C.UTF-8"], "Cmd": ["bash"]}
    base = _hash(inspect.getsource(layers), inspect.getsource(gpu_code), layers.suite(), str(config))
    helper = _hash(base, *layers.pins(layers.HELPER))
    torch = _hash(base, *layers.pins(layers.TRAINING), *layers.backend_sources())
    with_backend = config | {"Env": [*config["Env"], f"MANYCPU_CACHE={layers.BACKEND_CACHE}"]}
    return [
        Image("base", base, config, lambda: [layers.base(_workshop())]),
        Image("helper", helper, config, lambda: [layers.base(_workshop()), layers.helper(_workshop())]),
        Image("torch", torch, with_backend, _training),
    ]


def _training() -> list[Layer]:
    return [make(_workshop()) for make in (layers.base, layers.training, layers.backend)]


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
