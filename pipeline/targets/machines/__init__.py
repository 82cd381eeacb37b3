"""The driver for machines: this machine, or the hosts of a hostfile."""
