"""Preflight checks of a run's images: their versions, registries, logins and builder."""

import re
import shutil
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Final

import yaml
from fsspec.registry import known_implementations

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.adapters.registry import Connection, Repository
from manycpu.pipeline.adapters.registry_login import from_secret
from manycpu.pipeline.adapters.storage import protocols
from manycpu.pipeline.spec.errors import (
    ClusterError,
    Finding,
    ManycpuError,
    RegistryUnauthorizedError,
    TransientError,
)
from manycpu.pipeline.spec.image import Image, Reference
from manycpu.pipeline.spec.words import public
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of
from manycpu.pipeline.targets.kubernetes.image.base_image import finished_image
from manycpu.pipeline.targets.kubernetes.image.build_inputs import STAGES, Build, recipe
from manycpu.pipeline.targets.kubernetes.image.builder_pod import manifest
from manycpu.pipeline.targets.kubernetes.image.builders import PODS, WORKERS
from manycpu.pipeline.targets.kubernetes.image.registries import (
    Registries,
    own_repository,
    plain_hosts,
    pull_secret,
    registries,
)

RIGHTS: Final = Path(__file__).parents[1] / "build_rights.yaml"
PYTHON: Final = (3, 11)
TORCH: Final = (2, 6)
_DEADLINE_S: Final = 5.0  # short, so that a registry that does not answer is reported soon
_HELPER_PACKAGES: Final = frozenset({"fsspec", "huggingface_hub"})
"""Packages that manycpu's helper image has, and that fsspec needs for some protocols."""
_PACKAGE_OF_PROTOCOL: Final = dict.fromkeys(("http", "https"), "aiohttp") | dict.fromkeys(
    ("sftp", "ssh"), "paramiko"
)
"""Protocol that fsspec itself implements -> the other package that it needs."""
_DOCKER_CONFIG: Final = "kubernetes.io/dockerconfigjson"
# Package -> least version; two places where images state a version: manycpu's label, and the variable of the
# official images.
_LEAST_VERSIONS: Final = {
    "Python": (PYTHON, "manycpu.python", "PYTHON_VERSION"),
    "torch": (TORCH, "manycpu.torch", "PYTORCH_VERSION"),
}


def check_images(ctx: "ClusterContext") -> Iterator[Finding]:
    """Check that worker and pods can pull and push the images, and that the images' versions suffice."""
    # Several checks may have the same finding, such as an unreadable login: report it once.
    yield from dict.fromkeys(_findings(ctx))


def _findings(ctx: "ClusterContext") -> Iterator[Finding]:
    """Run all checks; an error that a check raises becomes a finding."""
    with registries(ctx, _DEADLINE_S) as opened:
        checks = _check_pull_secret, _check_finished_images, _check_push, _check_builder, _check_packages
        for check in checks:
            try:
                yield from check(ctx, opened)
            except TransientError as error:  # no answer: the next checks would also wait in vain
                yield _finding(error)
                return
            except ManycpuError as error:
                yield _finding(error)


def _finding(error: ManycpuError) -> Finding:
    return Finding(error.field or "target.registry", error.message, error.fix or "See docs/images.md")


def _check_pull_secret(ctx: "ClusterContext", _: Registries) -> Iterator[Finding]:
    """Check that the pull secret exists, and has a login for each registry of the run."""
    name = ctx.target.pull_secret
    if not name:
        return
    secret = pull_secret(ctx)
    if secret.get("type") != _DOCKER_CONFIG:
        yield _no_pull_secret(name, f"is of type {secret.get('type')}, not {_DOCKER_CONFIG}")
        return
    images = [reference for _, reference in _pulled_images(ctx)]
    for host in sorted({image.registry for image in images if from_secret(secret, image) is None}):
        yield _no_pull_secret(name, f"has no login for registry {host}")


def _check_finished_images(ctx: "ClusterContext", opened: Registries) -> Iterator[Finding]:
    """Check that finished images exist, have the right versions, and can be pulled by the pods."""
    if ctx.target.pull_policy == "Never":  # only the nodes have the images: nothing can be checked
        return
    for field, reference in _named_images(ctx):
        repository = opened.repository(reference)
        if repository.digest(reference.version) is None:
            yield Finding(field, f"there is no image {reference}", "Push it, or name another")
        elif field == "target.image":  # the image of the ranks
            image = repository.pull(reference.version)
            yield from too_old(image, str(reference), field)
            yield from _other_than_notebook(image, str(reference), ctx.needs)
    if ctx.target.pull_secret:  # the pods have logins: `_check_pull_secret` checks these
        return
    for field, reference in _pulled_images(ctx):
        if _asks_for_login(reference, ctx, opened):  # then it asks the pods, too
            yield Finding(
                field,
                f"registry {reference.registry} asks for a login, and the pods have none",
                "Name a pull secret in target.pull_secret, unless the nodes have a login of their own",
                fatal=False,
            )


def _check_push(ctx: "ClusterContext", opened: Registries) -> Iterator[Finding]:
    """Check that this machine may push images or, without a registry, that there is a finished image."""
    push_repository = own_repository(ctx)
    if push_repository is not None:
        opened.repository(push_repository).check_push()
    elif finished_image(ctx, "train") is None:
        yield Finding(
            "target.registry",
            "there is neither a registry to push images to nor a finished image",
            "Name a registry in target.registry, or an image in target.image",
        )


def _check_builder(ctx: "ClusterContext", _: Registries) -> Iterator[Finding]:
    """Check that the builder exists and supports the Dockerfiles, if an image may have to be built."""
    target, push_repository = ctx.target, own_repository(ctx)
    if push_repository is None or finished_image(ctx, "train"):  # nothing is built
        return
    if target.builder in PODS:
        yield from _check_builder_pod(ctx, push_repository)
    elif shutil.which(target.builder) is None:
        yield Finding(
            "target.builder",
            f"there is no program {target.builder} on this machine",
            f"Install {target.builder}, or set target.builder to pod",
        )
    else:
        for stage in STAGES:
            if finished_image(ctx, stage) is None:
                WORKERS[target.builder].check(recipe(ctx, stage))


def _check_packages(ctx: "ClusterContext", _: Registries) -> Iterator[Finding]:
    """Check that the helper image will have the package of each URL's protocol, such as s3fs for ``s3``."""
    requirements = ctx.target.build_args.get("HELPER_REQUIREMENTS", "")
    # The packages of a finished image or of a requirements file are not known here: do not check.
    if finished_image(ctx, "helper") or re.search(r"(^|\s)(-r|--requirement)", requirements):
        return
    # Parts of version numbers count as packages, too, which does no harm.
    provided = _HELPER_PACKAGES | {
        word.lower().replace("-", "_") for word in re.findall(r"[\w-]+", requirements)
    }
    for field in ("data", "model", "output"):
        for protocol in protocols(getattr(ctx.run, field) or ""):
            package = _PACKAGE_OF_PROTOCOL.get(protocol) or _module(protocol)
            if not {package, protocol} & provided:
                yield Finding(
                    f"run.{field}",
                    f"the helper image will lack {package}",
                    f"Set HELPER_REQUIREMENTS in target.build_args to {package}",
                    fatal=False,  # the base image may have it
                )


def _module(protocol: str) -> str:
    """Return the module that fsspec imports for a protocol, such as ``s3fs``, or ``fsspec`` itself."""
    return str(known_implementations.get(protocol, {}).get("class", "fsspec")).partition(".")[0]


def _check_builder_pod(ctx: "ClusterContext", push_repository: Reference) -> Iterator[Finding]:
    """Check with a dry run that the namespace for builds accepts a builder pod."""
    namespace = ctx.target.builds_in
    cluster = cluster_of(ctx).in_namespace(namespace)
    if namespace != ctx.target.namespace:  # the rights in the run's own namespace are checked with all others
        missing_rights = list(_missing_rights(cluster, namespace))
        yield from missing_rights
        if missing_rights:  # the dry run would fail for the same cause
            return
    try:
        build = Build(recipe(ctx, "train"), push_repository)
        pod = manifest(ctx, build, image="preflight", owners=[])  # a dry run pulls no image
        cluster.create(pod, dry_run=True)
    except ClusterError as error:
        level = PODS[ctx.target.builder].level
        yield Finding(
            "target.build_namespace",
            f"namespace {namespace} refuses a pod of the builder {ctx.target.builder}: {error.message}",
            f"Where images have yet to be built, name a namespace of Pod Security level {level}",
            fatal=False,  # the registry may have the images already
        )


def _missing_rights(cluster: Cluster, namespace: str) -> Iterator[Finding]:
    """Yield a finding for each right that this account lacks in the separate namespace for builds.

    ``cluster`` is the client for that namespace; ``namespace`` is its name, for the findings.
    """
    for rule in yaml.safe_load(RIGHTS.read_text())["rules"]:
        for resource, verb in product(rule["resources"], rule["verbs"]):
            plural, _, subresource = resource.partition("/")
            if not cluster.allowed(verb, plural, subresource=subresource):
                yield Finding(
                    "target.build_namespace",
                    f"this account may not {verb} {resource} in namespace {namespace}",
                    f"Give it the Role there: `kubectl -n {namespace} apply -f {RIGHTS}`, and a RoleBinding",
                )


def too_old(image: Image, name: str, field: str) -> Iterator[Finding]:
    """Yield a finding for each of Python and torch whose stated version in an image is too old for manycpu.

    A version that the image does not state is not checked. ``name`` and ``field`` are for the findings.
    """
    for what, (least, label, variable) in _LEAST_VERSIONS.items():
        text = _version(image, label, variable)
        version = tuple(int(part) for part in re.findall(r"\d+", text)[:2])  # (3, 11) of "3.11.4"
        if version and version < least:
            needed = ".".join(str(part) for part in least)
            yield Finding(
                field,
                f"{name} has {what} {text}; manycpu's node part needs {needed} or later",
                f"Take an image with {what} {needed} or later, or leave target.image out to have one built",
            )


def _version(image: Image, label: str, variable: str) -> str:
    """Read the version that an image states in its label or its variable; empty: it states none."""
    return image.labels.get(label) or image.env.get(variable) or ""


def _other_than_notebook(image: Image, name: str, needs: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each of Python and torch whose stated version differs from the notebook's.

    ``needs``: package -> the notebook's version. The ranks compare all of them at their start.
    """
    for what, (_, label, variable) in _LEAST_VERSIONS.items():
        text = _version(image, label, variable)
        needed = needs.get(what, "")
        parts = public(text).split(".")[: needed.count(".") + 1]  # as many as `needed` has: 3.12.4 fits 3.12
        if text and needed and parts != needed.split("."):
            yield Finding(
                "target.image",
                f"{name} has {what} {text}, and the notebook {needed}: a function travels between the "
                "same versions only",
                f"Take an image with {what} {needed}",
            )


def _named_images(ctx: "ClusterContext") -> Iterator[tuple[str, Reference]]:
    """Yield the target's finished images, each with its field."""
    for field in ("image", "helper_image"):
        if name := getattr(ctx.target, field):
            yield f"target.{field}", Reference.parse(name, f"target.{field}")


def _pulled_images(ctx: "ClusterContext") -> Iterator[tuple[str, Reference]]:
    """Yield what pods pull from, each with its field: the run's own repository, or the finished images."""
    push_repository = own_repository(ctx)
    if push_repository is not None:
        yield "target.registry", push_repository
    elif ctx.target.pull_policy != "Never":
        yield from _named_images(ctx)


def _asks_for_login(reference: Reference, ctx: "ClusterContext", opened: Registries) -> bool:
    """Whether a registry refuses to look up an image without a login; the image need not exist.

    False also if the registry does not answer, or refuses for another reason.
    """
    # A new connection, because those of `opened` may have a login.
    ca = ctx.target.registry_ca if reference.registry == opened.own_host else None
    connection = Connection(
        reference.registry, ca=ca, plain=reference.registry in plain_hosts(ctx), deadline=_DEADLINE_S
    )
    try:
        Repository(connection, reference.repository).digest(reference.version)
    except RegistryUnauthorizedError:
        return True
    except ManycpuError:
        return False
    finally:
        connection.close()
    return False


def _no_pull_secret(name: str, why: str) -> Finding:
    return Finding(
        "target.pull_secret",
        f"Secret {name} {why}",
        f"Make it: kubectl create secret docker-registry {name} --docker-server=HOST ...",
    )
