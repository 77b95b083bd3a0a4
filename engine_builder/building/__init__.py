"""From a model folder to engines and weights in a store: compile, check, keep."""
