"""The driver of Kubernetes: what each verb does there."""
