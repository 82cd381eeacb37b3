"""Connections to the registries of a run, with the run's logins."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from manycpu.pipeline.adapters import registry_login
from manycpu.pipeline.adapters.registry import DEADLINE, Connection, Repository
from manycpu.pipeline.adapters.registry_login import Login
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.image import Reference
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of

_REPOSITORY = "manycpu"


class Registries:
    """Connections to registries, one for each repository, as each may have a login; opened on first use."""

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

        It is from Airflow's connection, from docker's settings, or else from the pull secret.

        Raises:
            BadInputError: The target's docker settings or pull secret cannot be read.
        """
        target, connection = self._ctx.target, self._ctx.access.registry_login
        host = reference.registry
        if connection is not None and host == self.own_host:
            return Login(connection["username"], connection["password"])
        # With Airflow's connection, target.registry_connection names it, and not a file of settings.
        settings_file = target.registry_connection if connection is None else None  # None: docker's own
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
        # A registry alone is no image's name, which `parse` expects.
        text = f"{target.registry}/{_REPOSITORY}" if target.registry else target.image
        return Reference.parse(text, "target.registry").registry if text else None

    def close(self) -> None:
        """Close all connections."""
        for connection in self._open.values():
            connection.close()


@contextmanager
def registries(ctx: "ClusterContext", deadline: float = DEADLINE) -> Iterator[Registries]:
    """Open the registries of a run, and close their connections at the end."""
    opened = Registries(ctx, deadline)
    try:
        yield opened
    finally:
        opened.close()


def plain_hosts(ctx: "ClusterContext") -> frozenset[str]:
    """List the registries with plain HTTP: their images have ``http://`` before the name.

    Raises:
        BadInputError: A field is not the name of an image.
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
