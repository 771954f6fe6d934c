"""Off-policy learning of an actor on top of a frozen policy."""
