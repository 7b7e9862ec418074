"""Makes `import torchvision` work beside a CPU build of torch.

The wheels of torchvision on PyPI are built for CUDA. Their compiled part does not load beside a CPU build of torch, and
the import then fails because two operators are undeclared. This module declares them; nothing here calls them.
"""

from importlib.metadata import version

import torch

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

# A build for CPUs has a local version, such as 0.28.0+cpu, and declares the operators itself.
if torch.version.cuda is None and "+" not in version("torchvision"):
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(operator + SCHEMA)
