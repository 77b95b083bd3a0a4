"""The `preheat` command."""
