"""Names of components that tests iterate over."""

from model.pipeline.spec import SDXL, components_of

BASE_COMPONENTS = tuple(spec.name for spec in components_of("sdxl", ["base"]))
REFINER_COMPONENTS = tuple(spec.name for spec in components_of("sdxl", ["refiner"]))
UNET_VARIANTS = tuple(variant.name for spec in SDXL.values() for variant in spec.variants)
