"""The real server on this machine, and its client."""
