"""The index of a machine without GPUs may have torchvision for CUDA only, which does not define its operators there."""

from __future__ import annotations


def declare() -> None:
    """Declare what ``import torchvision`` looks for. Where it brings its operators, nothing changes."""
    import torch

    try:
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except RuntimeError:
        return
    torch.library.kept_for_tests = library  # type: ignore[attr-defined]  # they go with it
