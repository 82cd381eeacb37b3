"""No optimizers."""
