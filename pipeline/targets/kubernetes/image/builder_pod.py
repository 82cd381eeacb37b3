"""Build images in a pod without privileges, in a separate namespace if the target names one.

The pod's image is the builder's image with the build's context as one more layer. The pod pushes the image
that it built. The ledger records the pod and its Secret, and this module deletes both. Owner references do
not suffice: they do not work across namespaces, and a run with kept results keeps its ledger.
"""

import base64
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

from manycpu.pipeline.adapters.cluster import Cluster, poll
from manycpu.pipeline.launchers.pod_spec import env_list, literal, node_selector, one_off_pod, pod_spec
from manycpu.pipeline.spec.errors import BadInputError, ClusterError
from manycpu.pipeline.spec.image import Change, Reference
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of
from manycpu.pipeline.targets.kubernetes.image.build_inputs import BUILD_TIMEOUT_S, Build, LastLines
from manycpu.pipeline.targets.kubernetes.image.builders import ACCESS, CONTEXT, PODS, access
from manycpu.pipeline.targets.kubernetes.image.layers import append, tree
from manycpu.pipeline.targets.kubernetes.image.registries import Registries, own_repository
from manycpu.pipeline.targets.kubernetes.pod_status import containers, reasons

_MAX_CONTEXT_BYTES: Final = 512 << 20
_START_TIMEOUT_S: Final = 600.0  # within which the pod must start
_STUCK_TIMEOUT_S: Final = 60.0  # if a fault delays the pod's start; and for the deletion of an object
_POLL_INTERVAL_S: Final = 1.0


def build(ctx: "ClusterContext", image_build: Build, opened: Registries) -> None:
    """Build an image in a pod, which pushes it.

    Raises:
        BuildError: The build failed; the message has its last lines.
        ClusterError: The cluster refuses the pod.
    """
    cluster = cluster_of(ctx).in_namespace(ctx.target.builds_in)
    files = access(ctx, image_build, opened)  # logins and settings
    image = _push_builder_image(ctx, image_build, opened)
    pod = manifest(ctx, image_build, image, ctx.ledger.owner())
    with _temporary_objects(ctx, cluster, [_secret(pod["metadata"], files), pod]):
        _wait_for_end(cluster, pod["metadata"]["name"], image_build)


def manifest(ctx: "ClusterContext", image_build: Build, image: str, owners: list[KubeObject]) -> KubeObject:
    """Build the manifest of a builder pod, as the builder's Pod Security level allows it.

    Args:
        ctx: The run.
        image_build: The image to build.
        image: The builder's image, with the context in it.
        owners: The owner reference to the run's ledger; empty for a dry run.
    """
    metadata = _metadata(ctx, image_build, owners)
    name = metadata["name"]
    builder = PODS[ctx.target.builder]
    options = map(literal, builder.options(image_build.recipe))  # Kubernetes expands no $(NAME) in them
    # In the command, "build" is $0 of the script, and the image's name is $1.
    container = {
        "name": "build",
        "image": image,
        "command": ["sh", "-c", builder.script, "build", str(image_build.reference), *options],
        "env": env_list(builder.env),
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
        "securityContext": dict(builder.security),
        "volumeMounts": [
            {"name": "storage", "mountPath": builder.storage},
            {"name": "access", "mountPath": ACCESS, "readOnly": True},
        ],
    }
    volumes: list[KubeObject] = [
        {"name": "storage", "emptyDir": {}},
        {"name": "access", "secret": {"secretName": name, "defaultMode": builder.readable}},
    ]
    # No other fields of the target: its service account, for example, is in another namespace.
    spec = pod_spec(
        container,
        volumes,
        nodeSelector=node_selector(ctx.target),
        tolerations=list(ctx.target.tolerations),
        imagePullSecrets=[{"name": name}],
    )
    return one_off_pod(metadata, spec, int(BUILD_TIMEOUT_S))


def _metadata(ctx: "ClusterContext", image_build: Build, owners: list[KubeObject]) -> KubeObject:
    """Build the metadata of a builder pod and its Secret, which have the same name.

    The name has a part of the ledger's uid: runs of other namespaces may have the same name and build in the
    same namespace. Outside of the run's namespace, the objects have no owner, as owner references do not work
    there; and their run label is their own name, as a run of that namespace may have this run's label.
    """
    name = "-".join([ctx.name, "build", image_build.recipe.stage, *(owner["uid"][:8] for owner in owners)])
    if ctx.target.builds_in != ctx.target.namespace:
        return {"name": name, "labels": labels(name, verb="build")}
    return {"name": name, "labels": labels(ctx.name, verb="build"), "ownerReferences": owners}


def _secret(metadata: KubeObject, files: Mapping[str, str]) -> KubeObject:
    """Build the Secret with the pod's registry logins and settings; ``files``: file name -> content."""
    # `imagePullSecrets` reads the first key; the others are files for the builder.
    contents = {".dockerconfigjson": files["config.json"], **files}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/dockerconfigjson",
        "metadata": metadata,
        "data": {file: base64.b64encode(text.encode()).decode() for file, text in contents.items()},
    }


def _push_builder_image(ctx: "ClusterContext", image_build: Build, opened: Registries) -> str:
    """Append the build's context to the builder's image, and push the new image; return its name by digest.

    Raises:
        BadInputError: The context is larger than 512 MiB, or the target names no registry to push to.
    """
    files = image_build.recipe.files
    if sum(file.lstat().st_size for _, file in files) > _MAX_CONTEXT_BYTES:
        raise BadInputError(
            f"the build's context is larger than {_MAX_CONTEXT_BYTES >> 20} MiB",
            field="target.context",
            fix="Leave out what the Dockerfile does not copy",
        )
    context = tree(
        ((f"{CONTEXT}/{path}", file) for path, file in files),
        what="context",
        field="target.context",
        keep_links=True,
    )
    builder = Reference.parse(
        ctx.target.builder_image or PODS[ctx.target.builder].image, "target.builder_image"
    )
    repository = own_repository(ctx)
    if repository is None:
        raise BadInputError("a builder pod needs a registry", field="target.registry")
    name, _ = append(
        builder,
        repository,
        [context],
        change=lambda: Change(layers=[context.layer], env={}, labels={}),
        opened=opened,
    )
    return name


@contextmanager
def _temporary_objects(
    ctx: "ClusterContext", cluster: Cluster, manifests: list[KubeObject]
) -> Iterator[None]:
    """Create the objects, and delete them at the end of the ``with`` block, the last one first.

    The ledger records them before they are created, so that the run's cleanup deletes those that remain.
    """
    items_by_name = {
        f"{cluster.namespace}/{item['kind']}/{item['metadata']['name']}": item for item in manifests
    }
    try:
        with ctx.ledger.update() as entry:
            entry.elsewhere |= dict.fromkeys(items_by_name, "build")  # name -> why the run made it
        for item in manifests:
            _delete(cluster, item)  # an earlier try may have left one of the same name
            cluster.create(item)
        yield
    finally:
        # In reverse: the pod before its Secret.
        deleted = [name for name, item in reversed(items_by_name.items()) if _delete(cluster, item)]
        # FileNotFoundError: the run was deleted, ledger and all.
        with suppress(ClusterError, FileNotFoundError), ctx.ledger.update() as entry:
            for name in deleted:
                entry.elsewhere.pop(name, None)


def _delete(cluster: Cluster, item: KubeObject) -> bool:
    """Delete an object, and wait until it is gone.

    Returns False if it still exists after a minute, or the cluster does not answer: cleanup deletes it later.
    """
    delete = partial(cluster.delete, item["kind"], item["metadata"]["name"], grace=0)
    with suppress(ClusterError):
        # `delete` returns false if there is no such object.
        still_exists = poll(delete, done=lambda existed: not existed, timeout_s=_STUCK_TIMEOUT_S)
        return not still_exists
    return False


def _wait_for_end(cluster: Cluster, name: str, image_build: Build) -> None:
    """Log the pod's lines until the pod has succeeded.

    Raises:
        BuildError: The pod was deleted, does not start, failed, or took too long.
    """
    lines = LastLines()
    logged_count = 0
    began = time.monotonic()
    while True:
        pod = cluster.get("Pod", name)
        if pod is None:
            raise lines.failed(image_build, f"somebody deleted pod {cluster.namespace}/{name}")
        phase = pod["status"].get("phase", "Pending")
        if phase == "Pending":
            pod_reasons = reasons(pod)
            # Wait a shorter time for a fault that seldom passes by itself, such as a missing image.
            is_stuck = any(reason.stuck for reason in pod_reasons)
            if time.monotonic() - began > (_STUCK_TIMEOUT_S if is_stuck else _START_TIMEOUT_S):
                texts = "; ".join(reason.text for reason in pod_reasons)
                raise lines.failed(image_build, f"its pod does not start: {texts}")
        else:
            with suppress(ClusterError):  # the container has not started, or the pod is deleted
                log_lines = cluster.log(name).splitlines()  # all lines so far
                for line in log_lines[logged_count:]:
                    lines(line)
                logged_count = len(log_lines)
        if phase == "Succeeded":
            return
        if phase == "Failed" or time.monotonic() - began > BUILD_TIMEOUT_S + _START_TIMEOUT_S:
            raise lines.failed(image_build, f"pod {cluster.namespace}/{name} {_describe_end(pod)}")
        time.sleep(_POLL_INTERVAL_S)


def _describe_end(pod: KubeObject) -> str:
    """Describe how a failed pod ended: by the exit code of a container, else by the pod's own reason."""
    for container in containers(pod):
        if ended := container.state("terminated"):
            return f"ended with {ended['exitCode']} ({ended.get('reason', '')})"
    return f"failed: {pod['status'].get('reason', '')} {pod['status'].get('message', '')}".strip()
