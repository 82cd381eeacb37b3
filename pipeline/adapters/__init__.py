"""Every door to the outside: processes, MPI, ssh, storage."""
