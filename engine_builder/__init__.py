"""The offline half of Preheat: export, compile, validate, publish, and the `preheat` command."""
