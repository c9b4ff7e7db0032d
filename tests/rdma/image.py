"""The RDMA machine's kernel and initial RAM disk, made from the distribution's packages and cached.

It uses the distribution's newest stock kernel, since kernels for clouds and user-mode Linux have no
Soft-RoCE. It unpacks packages without installing them, so it does not need root.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_INIT: Final = Path(__file__).with_name("guest") / "init"
#: All modules that the machine loads; their dependencies are added. Modules that the kernel would request
#: from user space (crc32 for Soft-RoCE's packets, the last ones for tc) are listed too, since the machine has
#: no modprobe.
_MODULES: Final = (
    *("virtio_pci", "virtio_console", "virtio_rng", "9pnet_virtio", "9p", "overlay"),
    *("crc32_generic", "rdma_rxe", "rdma_ucm", "ib_umad", "veth", "sch_netem"),
    *("sch_ingress", "cls_matchall", "act_police"),
    *("ctr", "ghash_generic", "gcm", "tls"),
)
_FOLDERS: Final = ("bin", "dev", "host", "modules", "proc", "root", "sys", "writes")


class ImageError(Exception):
    """The image cannot be made; the message says why."""


@dataclass(frozen=True)
class Image:
    """The files that qemu boots, and rdma-core's own tests from the same distribution."""

    folder: Path

    @property
    def kernel(self) -> Path:
        return self.folder / "vmlinuz"

    @property
    def initrd(self) -> Path:
        return self.folder / "initrd"

    @property
    def rdma_core_tests(self) -> Path:
        return self.folder / "rdma-core" / "tests"


def find_image() -> Image:
    """Returns the newest image that this version of this module has made here, or makes one."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvxfer" / "rdma"
    made_of = hashlib.sha256(Path(__file__).read_bytes() + _INIT.read_bytes()).hexdigest()[:12]
    if kept := sorted(cache.glob(f"linux-image-*-{made_of}"), key=lambda folder: folder.stat().st_mtime):
        return Image(kept[-1])
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="new-") as folder:
        if os.geteuid() == 0:
            _call("apt-get", "update", "-qq")  # a mirror drops packages of old lists
        found = re.search(r"Depends: (linux-image-\S+)", _call("apt-cache", "depends", "linux-image-amd64"))
        if found is None:
            raise ImageError(
                "apt knows no linux-image-amd64: it takes Debian on x86-64, and `apt-get update`"
            )
        kept_as = cache / f"{found[1]}-{made_of}"
        made = _make(Path(folder), found[1])
        try:
            made.rename(kept_as)
        except OSError:  # another process was faster
            if not kept_as.exists():
                raise
    return Image(kept_as)


def _make(folder: Path, kernel: str) -> Path:
    for package in (kernel, "busybox-static", "python3-pyverbs"):
        print(f"downloading {package}", flush=True)
        _call("apt-get", "download", "-qq", package, cwd=folder)
        archive = next(folder.glob(f"{package}_*.deb"))
        _call("dpkg-deb", "--extract", str(archive), str(folder / package))
    tree = folder / kernel
    release = kernel.removeprefix("linux-image-")

    disk = folder / "disk"
    for name in _FOLDERS:
        (disk / name).mkdir(parents=True)
    shutil.copy(_INIT, disk / "init")
    (disk / "init").chmod(0o755)
    busybox = shutil.copy(folder / "busybox-static" / "bin" / "busybox", disk / "bin")
    _call("depmod", "--basedir", str(tree), release)
    steps = _call("modprobe", "-d", str(tree), "-S", release, "--show-depends", "--all", *_MODULES)
    paths = dict.fromkeys(re.findall(r"^insmod (\S+)", steps, re.MULTILINE))
    for path in paths:
        shutil.copy(path, disk / "modules")
    (disk / "modules" / "order").write_text("".join(f"{Path(path).name}\n" for path in paths))

    made = folder / "image"
    made.mkdir()
    (tree / "boot" / f"vmlinuz-{release}").rename(made / "vmlinuz")
    names = "".join(f"{path.relative_to(disk)}\n" for path in sorted(disk.rglob("*")))
    with (made / "initrd").open("wb") as initrd:
        subprocess.run(
            [busybox, "cpio", "-o", "-H", "newc"], input=names.encode(), stdout=initrd, cwd=disk, check=True
        )
    tests = folder / "python3-pyverbs" / "usr" / "share" / "doc" / "rdma-core" / "tests"
    for path in tests.glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    (made / "rdma-core").mkdir()
    tests.rename(made / "rdma-core" / "tests")
    return made


def _call(*command: str, cwd: Path | None = None) -> str:
    """Returns what a command printed. If it fails, the error has what it printed about that."""
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "LC_ALL": "C"}
    try:
        ended = subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ImageError(str(error)) from error
    if ended.returncode != 0:
        raise ImageError(f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr.strip()}")
    return ended.stdout
