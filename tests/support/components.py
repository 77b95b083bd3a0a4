"""Names of components that tests iterate over."""

from model.pipeline.components import FAMILIES
from model.validation import BAND_COUNTS

BASE_COMPONENTS = tuple(spec.name for spec in FAMILIES["sdxl"].specs("base"))
REFINER_COMPONENTS = tuple(spec.name for spec in FAMILIES["sdxl"].specs("refiner"))
UNET_VARIANTS = ("unet_guided", *(f"unet_{bands}_bands" for bands in BAND_COUNTS))
