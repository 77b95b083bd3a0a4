"""Trains Tiny SDXL, the small real SDXL that the project's tests and demos run on."""
