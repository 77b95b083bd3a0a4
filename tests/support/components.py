"""Names of components that tests iterate over."""

from model.pipeline.components import FAMILIES

BASE_COMPONENTS = tuple(spec.name for spec in FAMILIES["sdxl"].specs("base"))
REFINER_COMPONENTS = tuple(spec.name for spec in FAMILIES["sdxl"].specs("refiner"))
UNET_VARIANTS = tuple(variant.name for spec in FAMILIES["sdxl"].components.values() for variant in spec.variants)
