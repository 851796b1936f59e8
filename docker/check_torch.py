"""End a build before it downloads gigabytes of the wrong torch: ``check_torch.py cpu|cuda REPORT_OF_PIP``."""

import json
import sys
from pathlib import Path

device, report = sys.argv[1:]
if device not in ("cpu", "cuda"):
    sys.exit(f"DEVICE must be cpu or cuda, not {device!r}")
needed = [entry["metadata"]["name"].lower() for entry in json.loads(Path(report).read_text())["install"]]
found = "cuda" if any(name.startswith(("nvidia-", "cuda-")) for name in needed) else "cpu"
if found != device:
    sys.exit(
        f"the index has torch for {found}, but DEVICE is {device}: set TORCH_INDEX to PyTorch's own index for {device} "
        "(docker/README.md says where to find it)"
    )
