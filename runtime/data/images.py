"""Images as data: a folder with one folder of images for each class, or a column of images.

Each image is resized once, when the dataset is made, and stored as its pixels: bytes [channels height width] in RGB.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from megaloom.dsl.errors import UserError

from .token_ids import TokenIds

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
CHANNELS = 3
MEAN, DEVIATION = 0.5, 0.5  # by which ViT's images are normalized (arXiv:2010.11929, transformers' ViTImageProcessor)
PIXEL_IDS = TokenIds(256, name="pixels")
"""Ids of a dataset of images: values of pixels."""


@frozen
class ImageSize:
    """Height and width of the images of a dataset, in pixels."""

    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return channels, height and width."""
        return CHANNELS, self.height, self.width


def parse_image_size(text: str) -> ImageSize:
    """Return the size that --image-size names: "224", or height and width as "160x240"."""
    words = text.lower().split("x")
    if len(words) > 2 or not all(word.isdecimal() and 0 < int(word) <= 2**14 for word in words):
        raise UserError(f"--image-size {text} is not a size\ngive pixels, such as 224, or height and width: 160x240")
    return ImageSize(int(words[0]), int(words[-1]))


def require_pillow() -> None:
    """Raise UserError unless Pillow, which reads images, is installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise UserError("--image-size needs the package pillow\npip install 'megaloom[images]'") from None


def pixels_of(image: Any, size: ImageSize, place: Callable[[], str]) -> npt.NDArray[np.uint8]:
    """Return the pixels of an image resized to `size`, bytes [channels · height · width].

    image: a path, the bytes of a file, an image of Pillow, or rows of pixels. Raise UserError if it is none of these.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        opened = _opened(image).convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError, TypeError, Image.DecompressionBombError) as error:
        raise UserError(f"{place()} is not an image that Pillow reads: {error}\nremove or replace it") from None
    resized = opened.resize((size.width, size.height), Image.Resampling.BILINEAR)
    return np.asarray(resized, np.uint8).transpose(2, 0, 1).reshape(-1)


def _opened(image: Any) -> Any:
    """Return an image of Pillow."""
    from PIL import Image

    if isinstance(image, dict):  # a column of the library datasets, in Parquet
        image = image.get("bytes") or Path(image["path"])
    match image:
        case Path() | str():
            return Image.open(image)
        case bytes():
            return Image.open(BytesIO(image))
        case list() | np.ndarray():
            return Image.fromarray(np.asarray(image).astype(np.uint8))
    if not isinstance(image, Image.Image):
        raise TypeError(f"a value of type {type(image).__name__}")
    return image
