"""How a GPU divides the work of an FP8 convolution, by shape."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """How the work is divided: pixels and channels of a program's result, channels that it reads at once.

    group: tiles of pixels that run one after the other for the same weights.
    """

    pixels: int = 128
    channels: int = 128
    depth: int = 128
    group: int = 8
    warps: int = 8
    stages: int = 3

    def __str__(self) -> str:
        return f"{self.pixels}x{self.channels}x{self.depth} w{self.warps} s{self.stages}"


# Their shared memory fits compute capability 8.9, which has 99 KiB for a program. Not measured on such a GPU.
_TILES, _TILES_SHALLOW = Tiles(), Tiles(depth=64, stages=4)
_TILES_SMALL = Tiles(pixels=64, warps=4, stages=4)
# For GPUs that have 227 KiB for a program.
_TILES_WIDE, _TILES_TALL = Tiles(channels=256), Tiles(pixels=256)
_TILES_TALL_SHALLOW = Tiles(pixels=256, depth=64, stages=4)
_MULTIPROCESSORS = 132  # of an H100
_MIN_TALL_PIXELS = 2**14  # measured on both sides of it, at 8,192 and 32,768


def choose_tiles(pixels: int, depth: int, channels: int, capability: tuple[int, int]) -> Tiles:
    """Return the tiles for a result of so many pixels, over the batch, and channels.

    depth: input channels. capability: the GPU's compute capability. Tiles are 64 input channels deep if 128 does not
    divide the input channels.

    Measured on an H100 (pixels x channels): each was the fastest of 11 choices for the layers that it names.

    - 128x256: 512 and 256 channels of the VAE decoder at batch 1, 1,280 channels at 32x32 and batch 2. The latter have
      only 80 such tiles.
    - 128x128: 640 channels at 64x64 and batch 2.
    - 64x128: 640 channels with a stride of 2, from 64x64 and batch 2. They would have 80 tiles of 128x128.
    - 256x128, 64 deep: 320 input channels at 128x128 and batch 2.
    - 128x128, 64 deep: from 320 to 640 channels at 64x64 and batch 2. 320 channels with a stride of 2 have as many
      pixels. 128x256 was the fastest for them, and is not chosen.

    Other shapes were not measured, and 256x128 that is 128 deep, for at most 320 output channels, is a guess. GPUs of
    capability 10.x get the tiles of 9.0. Others get tiles that fit 8.9. Only the H100 was measured.
    """

    def count(tiles: Tiles) -> int:
        return -(-pixels // tiles.pixels) * -(-channels // tiles.channels)

    is_shallow = depth % _TILES.depth != 0
    if capability[0] not in (9, 10):
        return _TILES_SHALLOW if is_shallow else _TILES
    if is_shallow:
        return _TILES_TALL_SHALLOW if pixels >= _MIN_TALL_PIXELS else _TILES_SHALLOW
    if channels % _TILES_WIDE.channels == 0 and count(_TILES_WIDE) >= _MULTIPROCESSORS // 2:
        return _TILES_WIDE
    if channels <= 320 and pixels >= _MIN_TALL_PIXELS:
        return _TILES_TALL
    return _TILES if count(_TILES) >= _MULTIPROCESSORS else _TILES_SMALL
