"""What each verb does on machines: this one, or the hosts of a hostfile."""
