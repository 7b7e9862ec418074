"""Checks of the installed packages: versions, imports and required features."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from dataplane.cli.checks.finding import Finding, run_check
from dataplane.compat.switch import HOOK, MODULES, VARIABLE, names_in, replaced

PACKAGE = "rl-dataplane"
_INSTALL = f"pip install -U {PACKAGE}"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*])?\s*([^;]*)")
"""Name and version clauses of a requirement; extras and markers are skipped."""
_CLAUSE = re.compile(r"(>=|<=|==|<|>)\s*([0-9][0-9.]*)")
"""Operator and version of one clause."""
_DEVICES = Path("/dev")
"""The directory with the device files of GPUs."""
_DEVICE_FILES = {
    "nvidia[0-9]*": "install a torch with CUDA for this driver (`nvidia-smi`), and check CUDA_VISIBLE_DEVICES",
    "davinci[0-9]*": "install torch-npu for this driver (`npu-smi info`), and check ASCEND_RT_VISIBLE_DEVICES",
}
"""What to do if torch cannot use the devices of these files. Those of Intel's GPUs do not name their maker."""


def packages() -> Iterator[Finding]:
    """Run all checks of the installed packages."""
    yield from run_check("packages", _check_versions, _INSTALL)
    yield from run_check("imports", _check_imports, f"correct {VARIABLE}, or unset it")
    yield from run_check("protobuf", _check_protobuf, "pip install -U 'protobuf>=5.29,<8'")
    yield from run_check("gRPC", _check_grpc, "pip install -U grpcio")
    yield from run_check("ZMQ", _check_zmq, "pip install -U --only-binary :all: pyzmq")
    yield from run_check("Ray", _check_ray, "pip install -U ray")
    yield from run_check("torch", _check_torch, "pip install -U torch")


def _check_versions() -> Iterator[Finding]:
    """Check that all required packages are installed in a suitable version."""
    problems, count = [], 0
    for requirement in importlib.metadata.requires(PACKAGE) or []:
        if "extra ==" in requirement:  # an optional package
            continue
        count += 1
        problems += _find_problems(requirement)
    version = importlib.metadata.version(PACKAGE)
    found = f"{PACKAGE} {version}, {'; '.join(problems) or f'and all {count} required packages'}"
    yield Finding(what="packages", found=found, mend=_INSTALL if problems else "")


def _find_problems(requirement: str) -> list[str]:
    """Return the problems with one requirement, as texts."""
    matched = _REQUIREMENT.match(requirement)
    assert matched is not None, requirement
    name, clauses = matched[1], _CLAUSE.findall(matched[2])
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return [f"{name} is not installed"]
    if all(_satisfies(version, operator, bound) for operator, bound in clauses):
        return []
    return [f"{name} has version {version}, required is {matched[2].strip()}"]


def _satisfies(version: str, operator: str, bound: str) -> bool:
    """Whether the version satisfies a clause of a requirement, such as ">=" and "2.4"."""
    left, right = _release_numbers(version), _release_numbers(bound)
    match operator:
        case ">=":
            return left >= right
        case "<=":
            return left <= right
        case "<":
            return left < right
        case ">":
            return left > right
    return left == right  # "=="


def _release_numbers(version: str) -> tuple[int, ...]:
    """Parse the release number without trailing zeros: 2.13.0+cpu is (2, 13)."""
    matched = re.match(r"\d+(?:\.\d+)*", version)
    numbers = list(map(int, matched[0].split("."))) if matched else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _check_imports() -> Iterator[Finding]:
    """Check whether the compat switch is on and effective. Raises ValueError for an invalid value of its variable."""
    value = os.environ.get(VARIABLE)
    if not value:
        yield Finding(what="imports", found=f"{VARIABLE} is not set: no modules of other packages are replaced")
    elif all(replaced(name) for name in names_in(value)):
        pairs = ", ".join(f"{name} is {MODULES[name]}" for name in names_in(value))
        yield Finding(what="imports", found=f"{pairs} ({VARIABLE}={value})")
    else:
        found = f"{VARIABLE}={value} has no effect: Python did not read {HOOK} at its start"
        yield Finding(what="imports", found=found, mend=f"pip install --force-reinstall --no-deps {PACKAGE}")


def _check_protobuf() -> Iterator[Finding]:
    """Check that the generated messages load, with the fast implementation of protobuf."""
    from google.protobuf import __version__
    from google.protobuf.internal import api_implementation

    from dataplane.protocol.pb import bulk_pb2, control_pb2

    for module in (bulk_pb2, control_pb2):
        assert module.DESCRIPTOR.message_types_by_name
    kind = api_implementation.Type()  # "upb" is the fast one
    mend = "" if kind == "upb" else "pip install -U --only-binary :all: protobuf (this one is pure Python: slow)"
    yield Finding(what="protobuf", found=f"{__version__} ({kind}), the generated messages load", mend=mend)


def _check_grpc() -> Iterator[Finding]:
    from dataplane.protocol.grpc_loader import import_with_grpc

    server = import_with_grpc("dataplane.controller.grpc_server").GrpcServer
    yield Finding(what="gRPC", found=f"{importlib.metadata.version('grpcio')}, {server.__name__} loads")


def _check_zmq() -> Iterator[Finding]:
    """Check that libzmq has the features that connections need."""
    import zmq

    found = f"pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}"
    lacking = [name for name in ("curve", "ipc") if not zmq.has(name)]
    if lacking:
        mend = "pip install -U --force-reinstall --only-binary :all: pyzmq (wheels support both; TLS needs CURVE)"
        yield Finding(what="ZMQ", found=f"{found}, without {' and '.join(lacking)}", mend=mend)
    else:
        yield Finding(what="ZMQ", found=f"{found}, with CURVE and ipc")


def _check_ray() -> Iterator[Finding]:
    if importlib.util.find_spec("ray") is None:
        yield Finding(what="Ray", found="not installed; package `workers` needs it", mend="pip install ray")
    else:
        yield Finding(what="Ray", found=importlib.metadata.version("ray"))


def _check_torch() -> Iterator[Finding]:
    """Report the version of torch, and check that it can use the GPUs of this machine."""
    import torch

    from dataplane.core import devices

    yield Finding(what="torch", found=str(torch.__version__))
    if platform := devices.platform():
        names = ", ".join(sorted({platform.get_device_name(number) for number in range(platform.device_count())}))
        yield Finding(what="GPU", found=f"{platform.device_count()} for torch: {names}")
        return
    for pattern, mend in _DEVICE_FILES.items():
        if files := list(_DEVICES.glob(pattern)):
            yield Finding(what="GPU", found=f"{len(files)} in /dev, but torch cannot use any", mend=mend)
            return
    yield Finding(what="GPU", found="none; tensors on CPUs only")
