"""JPEG compression and decompression of images, with the bits of TensorFlow.

Robot data sets in RLDS hold JPEG images, and the public evaluations of models that were trained on them send each camera
image through ``tf.io.encode_jpeg`` and ``tf.io.decode_image`` first. TensorFlow decodes with the faster and coarser inverse
transform of libjpeg-turbo, which Pillow cannot choose and simplejpeg can.
"""

from __future__ import annotations

import io

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch import Tensor

QUALITY = 95
"""The default of TensorFlow."""


def jpeg_round_trip(images: Tensor) -> Tensor:
    """Return what ``tf.io.decode_image(tf.io.encode_jpeg(image))`` gives: quality 95, colours at half the resolution.

    ``images`` are uint8 RGB ``[B, 3, H, W]``, and so is the result, on the same device; the work is done on the CPU.
    """
    rows = images.permute(0, 2, 3, 1).cpu().contiguous().numpy()
    decoded = np.empty_like(rows)
    for row, image in enumerate(rows):
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "JPEG", quality=QUALITY, subsampling="4:2:0")
        decoded[row] = simplejpeg.decode_jpeg(stream.getvalue(), fastdct=True, fastupsample=False)
    return torch.from_numpy(decoded).permute(0, 3, 1, 2).contiguous().to(images.device)
