"""Off-policy learning of a head on a frozen policy."""
