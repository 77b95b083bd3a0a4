"""The type of decoded images and masks."""

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
"""[height, width, 3] of an image, [height, width] of a mask."""
