"""Declares the two operators for lack of which `import torchvision` fails where it was built for CUDA, and torch for
CPUs, as the wheels on PyPI are: its compiled part does not load there. Nothing here calls them."""

from importlib.metadata import PackageNotFoundError, version

import torch

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _installed() -> str:
    try:
        return version("torchvision")
    except PackageNotFoundError:
        return ""


if torch.version.cuda is None and _installed() and "+" not in _installed():
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(operator + SCHEMA)
