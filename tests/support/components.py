"""The names of components that tests go through."""

from model.pipeline.spec import SDXL, of_parts

BASE_COMPONENTS = tuple(spec.name for spec in of_parts(["base"]))
REFINER_COMPONENTS = tuple(spec.name for spec in of_parts(["refiner"]))
CFG_VARIANTS = tuple(variant.name for spec in SDXL.values() for variant in spec.variants)
