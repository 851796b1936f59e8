"""torchvision's detection, whose losses train on ranks like any other."""

from __future__ import annotations

from typing import Any

import pytest
import vision_ops
import watch
from sessions import Make

pytest.importorskip("PIL")
vision_ops.declare()
pytest.importorskip("torchvision")

pytestmark = [pytest.mark.slow, pytest.mark.framework("torchvision RetinaNet", "torchvision")]


def detect(steps: int) -> dict[str, Any]:
    """Trains RetinaNet with random weights to find a bright square."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    vision_ops.declare()
    from torchvision.models.detection import retinanet_resnet50_fpn

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = retinanet_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=2, min_size=64, max_size=64, trainable_backbone_layers=5
    )
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 5e-3)
    torch.manual_seed(dist.get_rank())
    images = torch.rand(2, 3, 64, 64) * 0.1
    images[:, :, 16:48, 16:48] += 0.9
    targets = [{"boxes": torch.tensor([[16.0, 16, 48, 48]]), "labels": torch.tensor([1])}] * 2
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        parts = wrapped(list(images), targets)
        loss = sum(parts.values())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weight": next(model.head.parameters()).sum().item(), "parts": sorted(parts)}


def test_retinanet_trains(make: Make) -> None:
    results = make(2).submit(detect, 6).results(3 * watch.DEADLINE)
    assert results[0]["parts"] == ["bbox_regression", "classification"]
    assert results[0]["losses"][-1] < results[0]["losses"][0]
    assert results[0]["weight"] == pytest.approx(results[1]["weight"], rel=1e-4)
