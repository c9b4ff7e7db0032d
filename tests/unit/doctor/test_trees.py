"""doctor: what it reads off /proc and /sys, on made-up trees of machines that are not this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.doctor import (
    available_transports,
    container,
    cpu,
    devices,
    foreign,
    huge_page_supply,
    memory_limits,
    network,
    software,
)
from kvxfer.doctor.finding import Finding, Probe, State, run_probe
from kvxfer.memory import control_group

MODULES = (available_transports, container, cpu, devices, foreign, huge_page_supply, memory_limits, network)
PROBES: dict[str, Probe] = {module.SUBJECT: module.examine for module in (*MODULES, software)}

Plant = Callable[[dict[str, str]], Path]


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Writes files, by path, into a root folder and returns it; ``-> target`` makes a link."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("-> "):
                path.symlink_to(text.removeprefix("-> "))
            else:
                path.write_text(text)
        return tmp_path

    return write


def named(findings: list[Finding], name: str) -> Finding:
    (found,) = (finding for finding in findings if finding.name == name)
    return found


def check_words(findings: list[Finding], subject: str) -> None:
    assert findings
    assert {finding.subject for finding in findings} == {subject}
    assert len({finding.name for finding in findings}) == len(findings)
    for finding in findings:
        assert finding.name != "probe", finding
        assert finding.found, finding
        assert finding.why, finding
        if finding.state in (State.LIMITS, State.BLOCKS):
            assert finding.change, finding


# ---- any machine --------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", PROBES)
def test_this_machine_is_examined(subject: str) -> None:
    check_words(run_probe(subject, PROBES[subject], Path("/")), subject)


@pytest.mark.parametrize("subject", PROBES)
def test_a_machine_without_any_file_is_examined(subject: str, tmp_path: Path) -> None:
    check_words(run_probe(subject, PROBES[subject], tmp_path), subject)
    check_words(run_probe(subject, PROBES[subject], tmp_path / "nowhere"), subject)


def garbage(root: Path) -> list[str]:
    """Every file that a probe reads, filled with content that a kernel never writes."""
    return [
        "proc/cpuinfo",
        "proc/driver/nvidia/gpus/0000:01:00.0/information",
        "proc/driver/nvidia/version",
        "proc/meminfo",
        "proc/self/cgroup",
        "proc/self/limits",
        "proc/self/status",
        "proc/sys/kernel/osrelease",
        "proc/sys/kernel/yama/ptrace_scope",
        "proc/sys/net/core/rmem_max",
        "proc/sys/net/core/wmem_max",
        "proc/sys/net/ipv4/tcp_rmem",
        "proc/sys/net/ipv4/tcp_wmem",
        "proc/sys/vm/max_map_count",
        "sys/bus/pci/devices/0000:01:00.0/class",
        "sys/bus/pci/devices/0000:01:00.0/vendor",
        "sys/class/infiniband/mlx5_0/ports/1/rate",
        "sys/class/net/eth0/mtu",
        "sys/class/net/eth0/speed",
        "sys/class/net/lo/flags",
        "sys/devices/system/node/node0/cpulist",
        "sys/fs/cgroup/cpu.max",
        "sys/fs/cgroup/memory.max",
        "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
        "sys/kernel/mm/hugepages/hugepages-hugekB/nr_hugepages",
        "sys/kernel/mm/transparent_hugepage/shmem_enabled",
    ]


@pytest.mark.parametrize("text", ["", "\n", "Max open files x:\nCapEff: zz\nUid:\n::\n1:", "\0\x7fé " * 9])
@pytest.mark.parametrize("subject", PROBES)
def test_files_of_garbage_are_survived(subject: str, text: str, plant: Plant, tmp_path: Path) -> None:
    plant(dict.fromkeys(garbage(tmp_path), text))
    check_words(run_probe(subject, PROBES[subject], tmp_path), subject)


def test_a_probe_that_raises_becomes_a_note(tmp_path: Path) -> None:
    def broken(root: Path) -> list[Finding]:
        raise ZeroDivisionError("a kernel of tomorrow")

    (finding,) = run_probe("memory", broken, tmp_path)
    assert (finding.subject, finding.state) == ("memory", State.NOTE)
    assert "a kernel of tomorrow" in finding.found


# ---- control groups -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "nbytes", "cores"),
    [
        (
            {
                "proc/self/cgroup": "0::/kube/pod/engine\n",
                "sys/fs/cgroup/kube/memory.max": "1073741824\n",
                "sys/fs/cgroup/kube/pod/memory.max": "536870912\n",
                "sys/fs/cgroup/kube/pod/engine/memory.max": "max\n",
                "sys/fs/cgroup/kube/cpu.max": "max 100000\n",
                "sys/fs/cgroup/kube/pod/engine/cpu.max": "150000 100000\n",
            },
            (512 << 20, "kube/pod/memory.max"),
            1.5,
        ),
        # A container sees its group at the root.
        (
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "4096\n"},
            (4096, "cgroup/memory.max"),
            None,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n0::/\n",
                "sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes": "1048576\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            (1 << 20, "docker/ab/memory.limit_in_bytes"),
            0.5,
        ),
        ({"proc/self/cgroup": "0::/a/../b\n", "sys/fs/cgroup/b/memory.max": "max\n"}, None, None),
    ],
    ids=["nested", "container", "version 1", "none"],
)
def test_the_tightest_group_above_limits(
    files: dict[str, str], nbytes: tuple[int, str] | None, cores: float | None, plant: Plant
) -> None:
    root = plant(files)
    limit, quota = control_group.memory_limit_nbytes(root), control_group.cpu_limit_cores(root)
    assert (quota and quota[0]) == cores
    assert (limit and limit[0]) == (nbytes and nbytes[0])
    assert not (limit and nbytes) or limit[1].endswith(nbytes[1])


def test_the_machines_memory_and_its_reserved_huge_pages(plant: Plant) -> None:
    root = plant(
        {
            "proc/meminfo": "MemTotal:       2048 kB\nSwapTotal:         0 kB\nHugePages_Free:     3\n",
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "3\n",
        }
    )
    assert control_group.machine_nbytes(root) == {"MemTotal": 2 << 20, "SwapTotal": 0}
    assert control_group.free_huge_nbytes(root) == 6 << 20
    assert control_group.free_huge_nbytes(root / "proc") == 0
    assert control_group.machine_nbytes(root / "proc") == {}


# ---- what one file says ------------------------------------------------------------------------

LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 524288               files
Max locked memory         {memlock}            unlimited            bytes
"""
CPUINFO = "model name\t: A CPU of 1999\nflags\t\t: fpu {flags}\n\nflags\t: avx2 avx512f\n"
LIMITS_OF, LOOPBACK, KERNEL = "proc/self/limits", "sys/class/net/lo/flags", "proc/sys/kernel/osrelease"


@pytest.mark.parametrize(
    ("examine", "file", "text", "state", "found", "change"),
    [
        (memory_limits.descriptors, LIMITS_OF, LIMITS, State.LIMITS, "RLIMIT_NOFILE is 1024", "ulimit -n"),
        (memory_limits.locked, LIMITS_OF, LIMITS.format(memlock="65536"), State.NOTE, "64 KiB", "memlock=-1"),
        (memory_limits.locked, LIMITS_OF, LIMITS.format(memlock="unlimited"), State.NOTE, "is unlimited", ""),
        (memory_limits.mappings, "proc/sys/vm/max_map_count", "65530", State.GOOD, "", ""),
        (memory_limits.mappings, "proc/sys/vm/max_map_count", "1024", State.LIMITS, "", "max_map_count"),
        (cpu.instructions, "proc/cpuinfo", CPUINFO.format(flags="avx2 avx512f"), State.GOOD, "of 1999", ""),
        (cpu.instructions, "proc/cpuinfo", CPUINFO.format(flags="sse2 avx2"), State.GOOD, "of 1999", ""),
        (cpu.instructions, "proc/cpuinfo", CPUINFO.format(flags="sse2"), State.LIMITS, "of 1999", ""),
        (cpu.cores, "sys/fs/cgroup/cpu.max", "50000 100000", State.LIMITS, "the time of 0.5", ""),
        (network.loopback, LOOPBACK, "0x9", State.GOOD, "", ""),
        (network.loopback, LOOPBACK, "0x8", State.LIMITS, "", "ip link"),
        (network.loopback, LOOPBACK, "", State.NOTE, "", ""),
        (foreign.yama, "proc/none", "", State.GOOD, "", ""),
        (container.pid_namespace, "proc/self/ns/pid", "-> pid:[4026531836]", State.GOOD, "", ""),
        (software.kernel, KERNEL, "6.8.0-45-generic\n", State.GOOD, "6.8.0-45-generic", ""),
        (software.kernel, KERNEL, "5.4.0\n", State.LIMITS, "5.4.0", ""),
        (software.kernel, KERNEL, "4.19\n", State.LIMITS, "4.19", "write into pools"),
        (software.kernel, KERNEL, "odd\n", State.NOTE, "odd", ""),
    ],
)
def test_what_a_file_says_is_found(
    examine: Callable[[Path], Finding],
    file: str,
    text: str,
    state: State,
    found: str,
    change: str,
    plant: Plant,
) -> None:
    finding = examine(plant({file: text}))
    assert finding.state is state
    assert found in finding.found
    assert change in finding.change
    assert change or state is not State.GOOD or not finding.change


# ---- foreign memory -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "capabilities", "state"),
    [
        (0, "0", State.GOOD),
        (1, "0", State.LIMITS),
        (1, "80000", State.GOOD),
        (2, "0", State.LIMITS),
        (2, "000001ffffffffff", State.GOOD),
        (3, "000001ffffffffff", State.LIMITS),
    ],
)
def test_yama_and_capabilities(scope: int, capabilities: str, state: State, plant: Plant) -> None:
    root = plant(
        {
            "proc/sys/kernel/yama/ptrace_scope": f"{scope}\n",
            "proc/self/status": f"Uid:\t7\t7\t7\t7\nCapEff:\t{capabilities}\n",
        }
    )
    finding = foreign.yama(root)
    assert finding.state is state
    assert f"ptrace_scope is {scope}" in finding.found
    assert ("kernel.yama.ptrace_scope" in finding.change) == (state is State.LIMITS)
    assert ("has CAP_SYS_PTRACE" in foreign.process(root).found) == (int(capabilities, 16) > 0)


# ---- memory -------------------------------------------------------------------------------------

MEMINFO = "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n"


def test_a_group_below_the_machines_memory_limits(plant: Plant) -> None:
    root = plant({"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": str(1 << 30)})
    finding = memory_limits.amount(root)
    assert finding.state is State.LIMITS
    assert "16 GiB in the machine, 8 GiB available; the control group allows 1 GiB" in finding.found
    plant({"sys/fs/cgroup/memory.max": str(64 << 30)})
    assert memory_limits.amount(root).state is State.GOOD
    assert memory_limits.total_nbytes(root) == 16 << 30


# ---- huge pages ---------------------------------------------------------------------------------


def test_reserved_pages_by_node(plant: Plant) -> None:
    root = plant(
        {
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "512",
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "500",
            "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "0",
            "sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages": "0",
            "sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages": "500",
            "sys/devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages": "0",
        }
    )
    small, large = (
        named(huge_page_supply.reserved(root), f"reserved, {size}") for size in ("2 MiB", "1 GiB")
    )
    assert (small.state, large.state) == (State.GOOD, State.NOTE)
    assert small.found == "512 reserved, 500 free (node0: 500 free, node1: 0 free)"
    assert "1000 MiB" in small.why


def test_no_free_reserved_page_limits(plant: Plant) -> None:
    root = plant(
        {
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "512",
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "0",
        }
    )
    (finding,) = huge_page_supply.reserved(root)
    assert finding.state is State.LIMITS
    assert "vm.nr_hugepages" in finding.change
    # Not where a pool found the other kind.
    (finding,) = huge_page_supply.reserved(root, State.NOTE)
    assert finding.state is State.NOTE
    assert "without it" in finding.why
    assert not finding.change


@pytest.mark.parametrize(
    ("shared", "private", "states"),
    [
        ("always within_size [advise] never deny force", "always [madvise] never", (State.GOOD, State.GOOD)),
        ("always within_size advise [never] deny force", "always madvise [never]", (State.LIMITS,) * 2),
        (
            "always within_size advise never [deny] force",
            "[always] madvise never",
            (State.LIMITS, State.GOOD),
        ),
    ],
)
def test_transparent_pages(shared: str, private: str, states: tuple[State, State], plant: Plant) -> None:
    folder = "sys/kernel/mm/transparent_hugepage"
    root = plant({f"{folder}/shmem_enabled": shared, f"{folder}/enabled": private})
    findings = huge_page_supply.transparent(root)
    assert tuple(finding.state for finding in findings) == states
    if states[0] is State.LIMITS:
        assert findings[0].change == f"echo advise > /{folder}/shmem_enabled"


# ---- processor ----------------------------------------------------------------------------------


def test_processes_that_may_run_on_several_nodes_are_told(plant: Plant) -> None:
    root = plant(
        {
            "sys/devices/system/node/node0/cpulist": "9000-9003",
            "sys/devices/system/node/node1/cpulist": "9004-9007",
        }
    )
    finding = cpu.numa(root)
    assert finding.state is State.LIMITS
    assert "numactl --cpunodebind=0" in finding.change
    plant({"sys/devices/system/node/node1/cpulist": "0-8191"})
    assert (cpu.numa(root).state, cpu.numa(root).found) == (
        State.GOOD,
        "2 nodes; this process runs on node 1 only",
    )


# ---- network ------------------------------------------------------------------------------------

CARDS = {
    "sys/class/net/bonding_masters": "bond0",
    "sys/class/net/lo/flags": "0x9",
    "sys/class/net/fast/speed": "100000",
    "sys/class/net/fast/operstate": "up",
    "sys/class/net/fast/mtu": "1500",
    "sys/class/net/fast/device/numa_node": "1",
    "sys/class/net/fast/device/driver": "-> /sys/bus/pci/drivers/mlx5_core",
    "sys/class/net/slow/speed": "1000",
    "sys/class/net/slow/operstate": "up",
    "sys/class/net/slow/device/numa_node": "-1",
    "sys/class/net/idle/speed": "-1",
    "sys/class/net/idle/operstate": "down",
    "sys/class/net/idle/device/uevent": "",
    "sys/class/net/veth0/speed": "10000",
    "sys/class/net/veth0/operstate": "up",
}


def test_cards_and_virtual_interfaces(plant: Plant) -> None:
    findings = network.interfaces(plant(CARDS))
    fast = named(findings, "fast")
    assert fast.state is State.GOOD
    assert fast.found.startswith("up, 100 Gb/s, MTU 1500")
    assert fast.found.endswith("NUMA node 1")
    assert "mtu 9000" in fast.change
    assert named(findings, "slow").state is State.LIMITS
    assert "NUMA" not in named(findings, "slow").found
    assert named(findings, "idle").change.startswith("ip link set idle up")
    assert named(findings, "virtual interfaces").found == "veth0: up, 10 Gb/s"
    assert len(findings) == 4


def test_small_buffers_are_named_with_their_command(plant: Plant) -> None:
    root = plant(
        {
            "proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t33554432",
            "proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t65536",
            "proc/sys/net/core/rmem_max": "212992",
            "proc/sys/net/core/wmem_max": "4194304",
        }
    )
    tcp, unix = network.tcp_buffers(root), network.unix_buffers(root)
    assert (tcp.state, unix.state) == (State.LIMITS, State.LIMITS)
    assert "net.ipv4.tcp_wmem" in tcp.change
    assert "tcp_rmem" not in tcp.change
    assert unix.change == "sysctl -w net.core.rmem_max=4194304"


# ---- devices ------------------------------------------------------------------------------------


def test_rdma_ports(plant: Plant) -> None:
    folder = "sys/class/infiniband/mlx5_0"
    root = plant(
        {
            f"{folder}/device/numa_node": "1",
            f"{folder}/ports/1/state": "4: ACTIVE",
            f"{folder}/ports/1/rate": "400 Gb/sec (4X NDR)",
            f"{folder}/ports/1/link_layer": "InfiniBand",
            f"{folder}/ports/2/state": "1: DOWN",
        }
    )
    findings = devices.examine(root)
    first, second = (named(findings, f"RDMA mlx5_0:{port}") for port in (1, 2))
    assert first.found == "4: ACTIVE, 400 Gb/sec (4X NDR), InfiniBand, on NUMA node 1"
    assert not first.change
    assert "bring its link up" in second.change


def test_gpus_with_and_without_a_driver(plant: Plant) -> None:
    root = plant(
        {
            "proc/driver/nvidia/gpus/0000:3b:00.0/information": "Model: \t NVIDIA H200\nIRQ:  1\n",
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64  570.86.15\nGCC version: 12",
            "sys/bus/pci/devices/0000:3b:00.0/vendor": "0x10de",
            "sys/bus/pci/devices/0000:3b:00.0/class": "0x030200",
            "sys/bus/pci/devices/0000:3b:00.0/numa_node": "0",
            "sys/bus/pci/devices/0000:5e:00.0/vendor": "0x10de",
            "sys/bus/pci/devices/0000:5e:00.0/class": "0x030200",
            "sys/bus/pci/devices/0000:5f:00.0/vendor": "0x10de",
            "sys/bus/pci/devices/0000:5f:00.0/class": "0x020000",
        }
    )
    findings = devices.examine(root)
    assert named(findings, "GPU 0").found == "NVIDIA H200 at 0000:3b:00.0, on NUMA node 0"
    assert "without a driver" in named(findings, "GPU 1").found
    assert "--gpus all" in named(findings, "GPU 1").change
    assert named(findings, "GPU driver").found.startswith("NVIDIA UNIX x86_64  570.86.15;")
    assert "GPU 2" not in {finding.name for finding in findings}


# ---- containers and software --------------------------------------------------------------------


def test_a_container_with_a_pid_namespace_of_its_own(plant: Plant) -> None:
    root = plant(
        {
            ".dockerenv": "",
            "proc/self/ns/pid": "-> pid:[4026532201]",
            "proc/self/ns/net": "-> net:[4026532203]",
        }
    )
    findings = container.examine(root)
    assert "Docker" in named(findings, "runtime").found
    assert named(findings, "pid namespace").state is State.LIMITS
    assert "shareProcessNamespace" in named(findings, "pid namespace").change
    assert "net:[4026532203]" in named(findings, "network namespace").change
