"""The RDMA machine: a stock kernel under qemu, with the host's root file system and two Soft-RoCE devices.

``python -m tests.rdma.machine -- COMMAND`` boots one, runs the command in it as root, in the same folder and
with the same environment, passes its output on at once, and exits with its status. Nothing changes on the
host: its files are read-only in the machine, and written files stay in the machine's memory and end with it,
except in the folder that ``--files`` names. ``guest/start`` makes the devices: ``rxe0`` (10.99.0.1) and
``rxe1`` (10.99.0.2), each on one end of a pair of virtual Ethernet interfaces.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from tests.rdma.image import Image, ImageError, find_image

#: Tells the guest's programs that they may break links and devices.
INSIDE: Final = "KVXFER_RDMA_MACHINE"
#: Without KVM a boot takes 8 s on an idle host; a busy one gets 30 times that.
_BOOT_LIMIT_S: Final = {"kvm": 60.0, "tcg": 240.0}
_CONSOLE_LINES: Final = 30
_START: Final = Path(__file__).with_name("guest") / "start"


class MachineError(Exception):
    """The machine ended without its command's status; the message says why."""


class BootError(MachineError):
    """The machine did not start the command."""


class CommandLimitError(MachineError):
    """The command ran past its limit, and the machine was ended."""


@dataclass(frozen=True)
class Machine:
    """A machine to boot. ``accelerator`` is qemu's word, kvm or tcg; "" uses KVM if it works."""

    image: Image
    accelerator: str = ""
    cpus: int = 2
    memory: str = "3G"
    qemu: str = "qemu-system-x86_64"

    def run(
        self,
        command: Sequence[str],
        *,
        limit_s: float,
        files: Path | None = None,
        environment: Mapping[str, str] = os.environ,
        stdout: BinaryIO | None = None,
        stderr: BinaryIO | None = None,
    ) -> int:
        """Boots a machine for one command and returns the command's exit status.

        Parameters
        ----------
        limit_s
            How long the command may take. Booting has a limit of its own.
        files
            A folder that the machine shares with the host, under the same path, for writing too.
        stdout, stderr
            Where the command's output goes at once; by default, this process's own.
        """
        sinks = stdout or sys.stdout.buffer, stderr or sys.stderr.buffer
        choices = [self.accelerator] if self.accelerator else ["kvm"] * _has_kvm() + ["tcg"]
        for index, accelerator in enumerate(choices):
            with tempfile.TemporaryDirectory(prefix="kvxfer-machine-") as made:
                folder = Path(made)
                shutil.copy(_START, folder / "start")
                (folder / "command").write_text(_script(command, environment))
                if files is not None:
                    (folder / "files").write_text(str(files.resolve()))
                try:
                    return self._run(accelerator, folder, limit_s, files, sinks)
                except BootError as error:
                    if index == len(choices) - 1:
                        raise
                    _say(f"{error}\nmachine: booting without {accelerator}")
        raise AssertionError("no accelerator")

    def _run(
        self, accelerator: str, folder: Path, limit_s: float, files: Path | None, sinks: Sequence[BinaryIO]
    ) -> int:
        began_s = time.monotonic()
        ended_by = ""
        booted_s: float | None = None
        try:
            process = subprocess.Popen(
                self._command(accelerator, folder, files),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise BootError(str(error)) from error
        assert process.stdout is not None
        assert process.stderr is not None
        pumps = [
            threading.Thread(target=_pump, args=ends, daemon=True)
            for ends in zip((process.stdout, process.stderr), sinks, strict=True)
        ]
        for pump in pumps:
            pump.start()
        try:
            while process.poll() is None and not ended_by:
                time.sleep(0.1)
                now_s = time.monotonic() - began_s
                if booted_s is None and (folder / "booted").exists():
                    booted_s = now_s
                    _say(f"booted in {booted_s:.1f} s under {accelerator}")
                if booted_s is None and now_s > _BOOT_LIMIT_S[accelerator]:
                    ended_by = f"it had not booted under {accelerator} after {now_s:.0f} s"
                if booted_s is not None and now_s - booted_s > limit_s:
                    ended_by = f"the command ran past its limit of {limit_s:g} s"
        finally:
            process.kill()
            process.wait()
            for pump in pumps:
                pump.join()
        if (folder / "status").exists() and (text := (folder / "status").read_text()):
            return int(text)
        booted = (folder / "booted").exists()
        reason = ended_by or f"qemu ended with {process.returncode} before the command did"
        kind = BootError if not booted else CommandLimitError if ended_by else MachineError
        raise kind(f"{reason}; the console's last lines:\n{_tail(folder / 'console')}")

    def _command(self, accelerator: str, folder: Path, files: Path | None) -> list[str]:
        shares = {"host": "path=/,readonly=on,multidevs=remap", "machine": f"path={_quoted(folder)}"}
        if files is not None:
            shares["files"] = f"path={_quoted(files.resolve())}"
        command = [
            # The machine ends with this process, also if that is killed by SIGKILL.
            *("setpriv", "--pdeathsig", "KILL", "--", self.qemu),
            *("-accel", accelerator, "-cpu", "max", "-machine", "q35"),
            *("-smp", f"{self.cpus}", "-m", self.memory),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-kernel", f"{self.image.kernel}", "-initrd", f"{self.image.initrd}"),
            # Emulated clocks disagree when the host is busy; panic=-1 ends qemu at once (-no-reboot).
            *("-append", "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable no_timer_check"),
            *("-serial", f"file:{_quoted(folder / 'console')}"),
            *("-device", "virtio-rng-pci", "-device", "virtio-serial-pci"),
        ]
        for name, share in shares.items():
            command += ["-fsdev", f"local,id={name},security_model=none,{share}"]
            command += ["-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"]
        for number, name in ((1, "stdout"), (2, "stderr")):
            command += ["-chardev", f"file,id={name},path=/dev/fd/{number},append=on"]
            command += ["-device", f"virtserialport,chardev={name},name={name}"]
        return command


def _has_kvm() -> bool:
    """Returns whether to try KVM; without the processor's support it cannot boot a stock kernel."""
    flags = re.search(r"^flags\s*:.*\b(vmx|svm)\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return flags is not None and os.access("/dev/kvm", os.R_OK | os.W_OK)


def _script(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Returns the script for bash in the machine: the command, in this folder and with this environment."""
    told = {**environment, INSIDE: "1"}
    exports = [
        f"export {name}={shlex.quote(value)}"
        for name, value in told.items()
        if re.fullmatch(r"[A-Za-z_]\w*", name)
    ]
    return "\n".join([*exports, f"cd {shlex.quote(str(Path.cwd()))}", f"exec {shlex.join(command)}", ""])


def _quoted(path: Path) -> str:
    """Returns a path as a value among qemu's options."""
    return str(path).replace(",", ",,")


def _pump(source: BinaryIO, sink: BinaryIO) -> None:
    with source:
        while data := os.read(source.fileno(), 1 << 16):
            sink.write(data)
            sink.flush()


def _tail(console: Path) -> str:
    try:
        lines = console.read_text(errors="replace").splitlines()
    except OSError:
        return "(none)"
    return "\n".join(lines[-_CONSOLE_LINES:]) or "(none)"


def _say(text: str) -> None:
    print(f"machine: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rdma.machine", description="Runs COMMAND beside RDMA."
    )
    parser.add_argument("--limit-s", type=float, default=600.0, help="how long COMMAND may take (600)")
    parser.add_argument("--files", type=Path, help="a folder that is the host's own in the machine, too")
    parser.add_argument(
        "--accelerator", default="", choices=("", "kvm", "tcg"), help="KVM where it works, else TCG"
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    options = parser.parse_args()
    try:
        if options.files is not None:
            options.files.mkdir(parents=True, exist_ok=True)
        machine = Machine(find_image(), options.accelerator)
        return machine.run(options.command, limit_s=options.limit_s, files=options.files)
    except CommandLimitError as error:
        _say(str(error))
        return 124
    except (ImageError, MachineError) as error:
        _say(f"cannot run the command: {error}")
        return 125


if __name__ == "__main__":
    sys.exit(main())
