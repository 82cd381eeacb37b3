"""Connections to the registries of a run, with the run's logins."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from manycpu.pipeline.adapters import registry_login
from manycpu.pipeline.adapters.registry import RETRY_TIMEOUT_S, Connection, Repository
from manycpu.pipeline.adapters.registry_login import Login
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.image import Reference
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of

_REPOSITORY = "manycpu"


class Registries:
    """Connections to registries, opened on first use.

    Each repository has its own connection, because each may have its own login.
    """

    def __init__(self, ctx: "ClusterContext", deadline: float) -> None:
        self._ctx, self._deadline = ctx, deadline
        self._open: dict[tuple[str, str], Connection] = {}
        self._plain = plain_hosts(ctx)

    def repository(self, reference: Reference) -> Repository:
        """Open the repository of an image."""
        host, name = reference.registry, reference.repository
        if (host, name) not in self._open:
            self._open[host, name] = Connection(
                host,
                login=self.login(reference),
                ca=self._ctx.target.registry_ca if host == self.own_host else None,
                plain=host in self._plain,
                deadline=self._deadline,
            )
        return Repository(self._open[host, name], name)

    def login(self, reference: Reference) -> Login | None:
        """Return the login for an image's repository; None: there is none.

        The first of these that has one decides: Airflow's connection (for the run's own registry), docker's
        settings, the pull secret.

        Raises:
            BadInputError: The target's docker settings or pull secret cannot be read.
        """
        target, connection = self._ctx.target, self._ctx.access.registry_login
        host = reference.registry
        if connection is not None and host == self.own_host:
            return Login(connection["username"], connection["password"])
        # target.registry_connection names either Airflow's connection or a file of docker settings.
        settings_file = target.registry_connection if connection is None else None  # None: docker's own file
        login = registry_login.from_config(registry_login.docker_config(settings_file), host)
        if login is None and target.pull_secret:
            login = registry_login.from_secret(pull_secret(self._ctx), reference)
        return login

    @property
    def own_host(self) -> str | None:
        """Host of the registry to which ``target.registry_connection`` and ``target.registry_ca`` apply.

        None: the target names neither a registry nor an image.
        """
        target = self._ctx.target
        # `parse` expects the name of an image, and a registry alone is none.
        text = f"{target.registry}/{_REPOSITORY}" if target.registry else target.image
        return Reference.parse(text, "target.registry").registry if text else None

    def close(self) -> None:
        """Close all connections."""
        for connection in self._open.values():
            connection.close()


@contextmanager
def registries(ctx: "ClusterContext", deadline: float = RETRY_TIMEOUT_S) -> Iterator[Registries]:
    """Open the registries of a run, and close their connections at the end."""
    opened = Registries(ctx, deadline)
    try:
        yield opened
    finally:
        opened.close()


def plain_hosts(ctx: "ClusterContext") -> frozenset[str]:
    """List the hosts with plain HTTP: the target writes ``http://`` before the names of their images.

    Raises:
        BadInputError: A field of the target is no valid name of an image or registry.
    """
    target = ctx.target
    images = {f"target.{name}": getattr(target, name) for name in ("image", "helper_image", "builder_image")}
    references = [Reference.parse(text, field) for field, text in images.items() if text]
    if own := own_repository(ctx):
        references.append(own)
    return frozenset(reference.registry for reference in references if reference.plain)


def own_repository(ctx: "ClusterContext") -> Reference | None:
    """Return the repository to which the run's images are pushed; None: the target names no registry."""
    prefix = ctx.target.registry
    return Reference.parse(f"{prefix.rstrip('/')}/{_REPOSITORY}", "target.registry") if prefix else None


def pull_secret(ctx: "ClusterContext") -> dict[str, Any]:
    """Read the Secret that ``target.pull_secret`` names, with logins for registries.

    Raises:
        BadInputError: The secret does not exist.
    """
    name = ctx.target.pull_secret or ""
    secret = cluster_of(ctx).get("Secret", name)
    if secret is None:
        raise BadInputError(
            f"there is no Secret {ctx.target.namespace}/{name}",
            field="target.pull_secret",
            fix=f"Make it: kubectl -n {ctx.target.namespace} create secret docker-registry {name} ...",
        )
    return secret
