"""RDMA devices and GPUs, as the kernel and the NVIDIA driver report them, and what runs on the GPUs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from kvxfer.doctor.files import binary_size, names_in, read_fields, read_int, read_text
from kvxfer.doctor.finding import Finding, State
from kvxfer.gpu import availability, calibration, driver
from kvxfer.gpu.calibration import Calibration
from kvxfer.gpu.origin import Origin
from kvxfer.memory import topology

SUBJECT = "devices"
_NVIDIA = "0x10de"
# PCI's class of display controllers: VGA (0300) and 3D (0302), which GPUs of servers are.
_DISPLAY = "0x03"
# native/gpu/copy_way.h: less aligned runs were measured separately.
_KERNEL_ALIGNMENT = 16
_ORIGINS = {
    Origin.PREBUILT: "is prebuilt",
    Origin.CACHED: "is in the cache",
    Origin.COMPILED: "will be compiled when it is first loaded (a second or two)",
}


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device; ``rate`` and ``state`` are the kernel's texts."""

    device: str
    port: str
    state: str
    rate: str
    link_layer: str
    numa_node: int | None

    @property
    def active(self) -> bool:
        return "ACTIVE" in self.state


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU; ``model`` is ``""`` if no driver serves it."""

    address: str
    model: str
    numa_node: int | None


def rdma_ports(root: Path) -> list[RdmaPort]:
    """Returns every port of every RDMA device."""
    ports = []
    for device in rdma_devices(root):
        folder = root / "sys/class/infiniband" / device
        node = read_int(folder / "device/numa_node")
        for port in names_in(folder / "ports"):
            state, rate, link_layer = (
                read_text(folder / "ports" / port / name) or "unknown"
                for name in ("state", "rate", "link_layer")
            )
            near = node if node is not None and node >= 0 else None
            ports.append(RdmaPort(device, port, state, rate, link_layer, near))
    return ports


def rdma_devices(root: Path) -> list[str]:
    """Returns the names of RDMA devices, e.g. ``["mlx5_0"]``."""
    return names_in(root / "sys/class/infiniband")


def gpus(root: Path) -> list[Gpu]:
    """Returns NVIDIA GPUs: those that the driver serves, and those on the bus without one."""
    models = {}
    for address in names_in(root / "proc/driver/nvidia/gpus"):
        fields = read_fields(root / "proc/driver/nvidia/gpus" / address / "information")
        models[address.lower()] = fields.get("Model", "unknown model")
    for address in names_in(root / "sys/bus/pci/devices"):
        folder = root / "sys/bus/pci/devices" / address
        kind = read_text(folder / "class") or ""
        if read_text(folder / "vendor") == _NVIDIA and kind.startswith(_DISPLAY):
            models.setdefault(address.lower(), "")
    return [
        Gpu(address, model, topology.node_of_device(address, root / "sys"))
        for address, model in sorted(models.items())
    ]


def examine(root: Path) -> list[Finding]:
    """Finds RDMA ports and GPUs, and says what kvxfer does with them in this version.

    Whether kernels can run is tried on this machine, wherever ``root`` is.
    """
    return [*_rdma(root), *_gpus(root), *gpu_kernels()]


def _rdma(root: Path) -> list[Finding]:
    why = "agents that name the transport verbs read peers' pages over RDMA"
    ports = rdma_ports(root)
    if not ports:
        found = "none (/sys/class/infiniband has no device)"
        return [Finding(SUBJECT, "RDMA", State.NOTE, found, why)]
    findings = []
    for port in ports:
        change = (
            ""
            if port.active
            else "bring its link up (cable, switch, `ip link set` on its netdev) before verbs can use it"
        )
        findings.append(
            Finding(
                SUBJECT,
                f"RDMA {port.device}:{port.port}",
                State.NOTE,
                f"{port.state}, {port.rate}, {port.link_layer}, {_near(port.numa_node)}",
                why,
                change,
            )
        )
    return findings


def _gpus(root: Path) -> list[Finding]:
    why = (
        "agents with the transport cuda_ipc move caches between GPUs of one host by kernels (below); "
        "between hosts, and between a GPU and host memory, pages go over tcp and unix, staged in "
        "pinned memory"
    )
    driver = read_text(root / "proc/driver/nvidia/version") or ""
    cards = gpus(root)
    if not cards:
        found = "no NVIDIA GPU: none on the PCI bus, and no driver (/proc/driver/nvidia is missing)"
        if driver:
            found = "an NVIDIA driver is loaded, but offers no GPU to this process"
        tool = "" if shutil.which("nvidia-smi") else "; nvidia-smi is not on the PATH"
        return [Finding(SUBJECT, "GPU", State.NOTE, found + tool, why)]
    findings = []
    for index, gpu in enumerate(cards):
        found = f"{gpu.model or 'an NVIDIA GPU without a driver'} at {gpu.address}, {_near(gpu.numa_node)}"
        change = "" if gpu.model else "install NVIDIA's driver, or start the container with --gpus all"
        findings.append(Finding(SUBJECT, f"GPU {index}", State.NOTE, found, why, change))
    if driver:
        peermem = (root / "sys/module/nvidia_peermem").exists()
        findings.append(
            Finding(
                SUBJECT,
                "GPU driver",
                State.NOTE,
                f"{driver.splitlines()[0].removeprefix('NVRM version:').strip()}; nvidia_peermem is "
                f"{'loaded' if peermem else 'not loaded'}",
                "the transport verbs moves GPU memory through NICs as dma-bufs, or with nvidia_peermem",
            )
        )
    return findings


def gpu_kernels() -> list[Finding]:
    """Says of every GPU that the driver serves whether kernels can run on it, and where they come from.

    Starts the driver in this process if there is one, and imports cuda-core if it has a GPU.
    """
    why = (
        "the transport cuda_ipc launches kernels that gather, scatter and convert pages on a GPU; so "
        "far both have run over an emulated driver only"
    )
    found = driver.look()
    if found.failure:
        shown = f"cannot run here: {found.failure}"
        return [Finding(SUBJECT, "GPU kernels", State.NOTE, shown, why, found.change)]
    findings = []
    for device in found.devices:
        able = availability.of_device(device, found.version)
        findings.append(_kernels_of(able, device, why))
        if able.usable:
            findings.append(host_copies(device, found.version, calibration.look(device, found.version)))
    return findings


def host_copies(device: driver.Device, driver_version: tuple[int, int], kept: Calibration | None) -> Finding:
    """Says how pages are copied between a GPU and host memory, and by which measurements; measures nothing.

    Parameters
    ----------
    device, driver_version
        The GPU and its driver, as `kvxfer.gpu.driver` returns them.
    kept
        Its calibration; None if it has none yet.
    """
    why = (
        "staging copies pages between the GPU and pinned memory: by kernels, whose CTAs "
        "AgentOptions(gpu_ctas=) sets, or by copy engines, which leave the compute units to the "
        "model; AgentOptions(copy_engines=False) uses kernels only. So far run over an emulated "
        "driver only"
    )
    name = f"GPU {device.index} host copies"
    is_old = driver_version < calibration.LEAST_CUDA
    change = "install a driver for CUDA 12.8 or later" if is_old else ""
    if kept is None:
        shown = [
            "not calibrated yet: the first agent with cuda_ipc and staging measures for up to a "
            "second, and keeps the result"
        ]
    else:
        shown = [_ctas_of(kept)]
    if is_old:
        shown.append("by kernels: the driver has no batched copies")
    elif kept is not None and not kept.samples:
        shown.append("by kernels: the driver has no batched copies for this device")
    elif kept is not None:
        shown += [_way_of(kept, to_host) for to_host in (True, False)]
    return Finding(SUBJECT, name, State.NOTE, "; ".join(shown), why, change)


def _ctas_of(kept: Calibration) -> str:
    """Returns the number of CTAs, and the rates by number of CTAs."""
    ctas = f"kernels of {kept.num_ctas} CTA{'s' if kept.num_ctas > 1 else ''}"
    rates = kept.rates()
    if not rates:
        return f"{ctas}, whose rates could not be measured"
    found = ", ".join(f"{rate.num_ctas}: {_gb(rate.to_host)} and {_gb(rate.from_host)}" for rate in rates)
    return f"{ctas} (GB/s to and from host memory, by CTAs: {found})"


def _gb(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:.1f}"


def _way_of(kept: Calibration, to_host: bool) -> str:
    """Returns the way of copying in a direction, from which size of run on, and the rates of aligned runs."""
    taken = []
    for choice in kept.choices():
        if choice.to_host != to_host or choice.least_nbytes is None:
            continue
        loose = "" if choice.aligned else " that are not aligned to 16 bytes"
        taken.append(f"{choice.form}{loose} of {binary_size(choice.least_nbytes)} and more")
    rates = [
        f"{binary_size(nbytes)} {engine_ns / kernel_ns:.2f}"
        for direction, form, alignment, nbytes, kernel_ns, engine_ns in sorted(kept.samples)
        if (direction == 0) == to_host and form == 0 and alignment == _KERNEL_ALIGNMENT
    ]
    way = f"by copy engines {', '.join(taken)}, else by kernels" if taken else "by kernels"
    return (
        f"{'to' if to_host else 'from'} host memory {way} (engines' time divided by kernels', by size "
        f"of run: {', '.join(rates)})"
    )


def _kernels_of(able: availability.Availability, device: driver.Device, why: str) -> Finding:
    name = f"GPU {device.index} kernels"
    serves = (
        f"{device.name} ({device.architecture}, {binary_size(device.memory_nbytes)}), the driver is for CUDA "
        f"{able.driver_version[0]}.{able.driver_version[1]}"
    )
    if not able.usable:
        return Finding(
            SUBJECT, name, State.NOTE, f"{serves}; kernels cannot run: {able.missing}", why, able.change
        )
    cubins = ", ".join(f"{kernel} {_ORIGINS[origin]}" for kernel, origin in able.origins)
    return Finding(SUBJECT, name, State.NOTE, f"{serves}; {cubins}", why)


def _near(node: int | None) -> str:
    return "NUMA node unknown to the kernel" if node is None else f"on NUMA node {node}"
