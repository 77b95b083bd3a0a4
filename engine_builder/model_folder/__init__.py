"""Model folders in diffusers' layout: found, read, and made up for benchmarks."""
