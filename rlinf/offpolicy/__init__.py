"""Off-policy learning of an actor on a frozen policy."""
