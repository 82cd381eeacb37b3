"""What each verb does on Kubernetes."""
