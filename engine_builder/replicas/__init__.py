"""How many replicas a traffic needs."""
