"""Training of Tiny SDXL, the small SDXL model of the tests and demos."""
