"""What this installation can do, in the style of `horovodrun --check-build`.

Everything is tried, not guessed: a line has its mark only when the thing was imported and answered.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import socket
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import ModuleType

from ..fronts.horovod import installed

STALL_WARNING = (
    "Horovod's stall check does nothing under its Gloo controller: it will not report a stalled rank. The exchanges "
    "of horovod-compress have their own deadline instead (option timeout=)."
)
HOROVOD_WARNING = (
    "Horovod was built without CUDA: it copies GPU tensors, such as those given to broadcast_parameters, to the host, "
    "and reads them without waiting for the copy. Call broadcast_parameters before the model moves to the GPU, or run "
    "make setup CUDA=1."
)
HOST_PROBLEM = (
    "the name of this host does not resolve, which makes Horovod's Gloo crash with a segmentation fault: add the name "
    "to /etc/hosts"
)
#: What a setting of the environment that cannot be had is reported as.
REFUSED = "ConfigError: "
CUDA_TORCH, CUDA_TENSORS = "a PyTorch for CUDA 13", "CUDA tensors"


@dataclass(frozen=True)
class Item:
    """One line of the report."""

    name: str
    available: bool
    detail: str = ""
    needed: bool = True  # False: a job runs without it

    def text(self) -> str:
        return f"    [{'X' if self.available else ' '}] {self.name}{f' ({self.detail})' if self.detail else ''}"


@dataclass(frozen=True)
class Report:
    """Everything that `--check-build` says."""

    version: str
    kernels: list[Item]
    transports: list[Item]
    methods: list[Item]
    horovod: list[Item]
    torch: list[Item]
    host: list[Item] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    missing_for_gpus: list[str] = field(default_factory=list)  # no problem where gradients are on CPUs

    def problems(self) -> list[str]:
        """What keeps a job from running here."""
        between_processes = [item for item in self.transports if item.name != "local"]
        items = (*self.kernels, *self.transports)
        refused = [item.detail.removeprefix(REFUSED) for item in items if item.detail.startswith(REFUSED)]
        ours = {
            "no kernels: reinstall horovod-compress with a C++ compiler": any(item.available for item in self.kernels),
            "no transport between processes": any(item.available for item in between_processes),
            "no methods": any(item.available for item in self.methods),
        }
        if refused:  # nothing of ours imports then, or no rank would find another
            ours = {refused[0]: False}
        needs = ours | {
            "no Horovod for PyTorch: `make setup` builds one": _complete(self.horovod),
            "no PyTorch: pip install torch": _complete(self.torch),
            HOST_PROBLEM: _complete(self.host),
        }
        return [name for name, met in needs.items() if not met]

    def as_json(self) -> str:
        return json.dumps({**asdict(self), "usable": not self.problems(), "problems": self.problems()}, indent=2)

    def as_text(self) -> str:
        sections = {
            "Available Kernels": self.kernels,
            "Available Transports": self.transports,
            "Available Methods": self.methods,
            "Horovod": self.horovod,
            "PyTorch": self.torch,
            "Host": self.host,
        }
        lines = [f"horovod-compress v{self.version}:"]
        for title, items in sections.items():
            lines += ["", f"{title}:", *(item.text() for item in items)]
        variables = [f"{name}={value}" for name, value in self.environment.items()] or ["no variable of ours is set"]
        lines += ["", "Environment:", *(f"    {line}" for line in variables), ""]
        # The command first: it must not be broken over two lines.
        command = f"make setup CUDA=1{' TORCH=torch==VERSION' if CUDA_TORCH in self.missing_for_gpus else ''}"
        adds = f"adds what gradients on GPUs also need: {', '.join(self.missing_for_gpus)}."
        gpus = [f"{command}, run in the source folder, {adds}"] if self.missing_for_gpus else []
        notes = {"Note:   ": gpus, "Warning:": self.warnings, "Problem:": self.problems()}
        for kind, texts in notes.items():
            lines += [textwrap.fill(f"{kind} {text}", width=100, subsequent_indent=" " * 9) for text in texts]
        return "\n".join(lines)


def _complete(items: list[Item]) -> bool:
    return all(item.available for item in items if item.needed)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; status 0 when a job can run here."""
    report = collect(os.environ)
    print(report.as_json() if arguments.json else report.as_text())
    return 1 if report.problems() else 0


def collect(environment: Mapping[str, str]) -> Report:
    """Return everything that there is to report, each item checked by trying it."""
    horovod, ours = horovod_items(), ("HVC_", *_addresses().INTERFACES)
    return Report(
        version=package_version(),
        kernels=[attempt("reference", _reference), attempt("CPU", _cpu), attempt("CUDA", _cuda, needed=False)],
        transports=[attempt("local", _local), attempt("gloo", _gloo), attempt("nccl", _nccl, needed=False)],
        methods=method_items(),
        horovod=horovod,
        torch=[attempt("PyTorch", _torch)],
        host=[host_item(horovod)],
        environment={name: environment[name] for name in sorted(environment) if name.startswith(ours)},
        warnings=horovod_warnings(horovod),
        missing_for_gpus=missing_for_gpus(),
    )


def package_version() -> str:
    """Return the installed version."""
    try:
        return importlib.metadata.version("horovod-compress")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (run from a folder, not installed)"


class Unavailable(Exception):
    """A reason, in words, why something cannot be used here."""


def attempt(name: str, check: Callable[[], str], needed: bool = True) -> Item:
    """Runs one check; its answer is the detail, and its exception the reason why not."""
    try:
        return Item(name, True, check(), needed)
    except Unavailable as reason:
        return Item(name, False, str(reason), needed)
    except Exception as error:  # noqa: BLE001  a broken installation must be reported, whatever way it breaks
        # The reason stands in the first line: what follows it is for whoever debugs that package.
        first = (str(error).strip() or "no message").splitlines()[0]
        return Item(name, False, f"{type(error).__name__}: {first}", needed)


# ---- kernels ----------------------------------------------------------------------------------


def _reference() -> str:
    importlib.import_module("horovod_compress.ops.reference.checksums")
    return ""


def _cpu() -> str:
    loader = importlib.import_module("horovod_compress.ops.loader")
    return str(loader.load("_cpu").instruction_set())


def _cuda() -> str:
    if importlib.util.find_spec("horovod_compress._cuda") is None:
        raise Unavailable("not built: make setup CUDA=1, or install with nvcc and HVC_CUDA=1")
    loader = importlib.import_module("horovod_compress.ops.loader")
    count = loader.load("_cuda").device_count()
    if count == 0:
        raise Unavailable("built, no device found")
    return f"{count} device{'s' if count > 1 else ''}"


# ---- transports -------------------------------------------------------------------------------


def _local() -> str:
    importlib.import_module("horovod_compress.exchange.transports.local")
    return "threads of one process"


def _gloo() -> str:
    importlib.import_module("horovod_compress.exchange.transports.gloo")
    distributed = importlib.import_module("torch.distributed")
    if not (distributed.is_available() and distributed.is_gloo_available()):
        raise Unavailable("this PyTorch was built without Gloo")
    _addresses().own_address(True, _addresses().INTERFACES)
    return ""


def _addresses() -> ModuleType:
    """Return the module of addresses, which imports Horovod's errors where there are any."""
    return importlib.import_module("horovod_compress.exchange.transports.addresses")


def _nccl() -> str:
    library = _nccl_library()
    _device_of_torch()
    return library


def _nccl_library() -> str:
    nccl = importlib.import_module("horovod_compress.exchange.transports.nccl")
    if reason := nccl.why_not():
        raise Unavailable(reason)
    return f"NCCL {nccl.api().get_version()}"


# ---- GPUs -------------------------------------------------------------------------------------


def missing_for_gpus() -> list[str]:
    """What gradients on a GPU need and this installation lacks; whether there is a GPU is another question."""
    found = {
        CUDA_TORCH: attempt("", _cuda_of_torch).available,
        "the CUDA kernels": importlib.util.find_spec("horovod_compress._cuda") is not None,
        "CuPy with NCCL": attempt("", _nccl_library).available,
    }
    return [name for name, present in found.items() if not present]


def _cuda_of_torch() -> str:
    release = importlib.import_module("torch").version.cuda
    if not release:
        raise Unavailable("CPU only")
    return str(release)


def _device_of_torch() -> str:
    if not importlib.import_module("torch").cuda.is_available():
        raise Unavailable("no device found")
    return "a device"


# ---- methods, Horovod, PyTorch ----------------------------------------------------------------


def method_items() -> list[Item]:
    """Return the registered methods, or why there are none."""
    try:
        names = importlib.import_module("horovod_compress.codecs.registry").available()
    except Exception as error:  # noqa: BLE001  likewise
        return [Item("none", False, f"horovod_compress.codecs does not import: {type(error).__name__}: {error}")]
    return [Item(name, True) for name in names]


def horovod_items() -> list[Item]:
    """Return Horovod, its PyTorch part and what that was built with, as far as they import."""
    found = attempt("Horovod", installed.version)
    if not found.available:
        return [found]
    framework = attempt("PyTorch framework", _horovod_torch)
    if not framework.available:
        return [found, framework]
    built = [Item(f"{name} controller", True) for name, present in installed.controllers().items() if present]
    optional = {"NCCL operations": installed.has_nccl(), CUDA_TENSORS: installed.has_cuda()}
    extras = [Item(name, present, "" if present else "not needed on CPUs", False) for name, present in optional.items()]
    return [found, framework, *(built or [Item("controller", False, "neither Gloo nor MPI")]), *extras]


def horovod_warnings(horovod: list[Item]) -> list[str]:
    """What Horovod does not say by itself."""
    found = {item.name: item.available for item in horovod}
    waits = found.get(CUDA_TENSORS, True) or not attempt("", _device_of_torch).available
    warnings = {STALL_WARNING: "Gloo controller" in found, HOROVOD_WARNING: not waits}
    return [text for text, holds in warnings.items() if holds]


def host_item(horovod: list[Item]) -> Item:
    """Return whether this host's name resolves: Horovod's Gloo looks it up, and does not notice when that fails."""
    built = {item.name for item in horovod}
    found = attempt("name resolves", _host_name)
    return replace(found, needed="Gloo controller" in built and "MPI controller" not in built)


def _host_name() -> str:
    name = socket.gethostname()
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unavailable(f"{name}: {error.strerror or error}") from None
    return f"{name} is {answers[0][4][0]}"


def _horovod_torch() -> str:
    installed.load_library()
    return ""


def _torch() -> str:
    torch = importlib.import_module("torch")
    cuda = torch.version.cuda
    return f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'CPU only'}"
