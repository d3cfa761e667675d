"""The memory of engines, as tensors: what they hand over are addresses and views."""

from __future__ import annotations

import ctypes

import torch

from blockkv.errors import InvalidArgument

__all__ = ["tensor_at", "tensor_of"]


def tensor_at(address: int, size_bytes: int) -> torch.Tensor:
    """The `size_bytes` bytes from `address` on, as a uint8 tensor. Whoever calls keeps that memory alive."""
    if address <= 0 or size_bytes < 1:
        raise InvalidArgument(f"no memory: {size_bytes} bytes at address {address}")
    return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=torch.uint8)


def tensor_of(view: memoryview) -> torch.Tensor:
    """A contiguous view's bytes, as a uint8 tensor of one axis, without a copy."""
    if not view.c_contiguous:
        raise InvalidArgument(f"a view of shape {view.shape} with strides {view.strides} is not contiguous")
    return torch.frombuffer(view.cast("B"), dtype=torch.uint8)
