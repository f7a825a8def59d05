"""The formula that every calculator starts with, kept as a figure to compare with and never used for an answer."""

from __future__ import annotations

from pytest_vram.sizing.shape import ModelShape


def kv(shape: ModelShape, context: int, bytes_per_element: float) -> int:
    """Bytes of ``2 · layers · KV heads · head size · context · bytes per element``.

    The plain form, as if every block had the widest block's heads and kept every token: wrong for sliding windows,
    latent attention, recurrent blocks and shared caches. An encoder keeps no cache; the formula says otherwise.

    :param context: tokens. :param bytes_per_element: 2 for f16, 1 for an 8-bit cache.
    """
    return int(2 * len(shape.layers) * shape.kv_heads * shape.head_size * context * bytes_per_element)
