"""Access to the outside: processes, MPI, ssh, storage, clusters, registries and trackers."""
