import json
import subprocess
from pathlib import Path

from kvxfer.bench.report import machine


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_facts_are_read_off_the_given_roots(tmp_path: Path) -> None:
    write(tmp_path / "proc/cpuinfo", "processor\t: 0\nmodel name\t: Abacus 9000\n\nmodel name\t: other\n")
    write(tmp_path / "proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\n")
    write(tmp_path / "proc/sys/kernel/osrelease", "6.1.0-test\n")
    for core, governor in enumerate(("performance", "performance", "powersave")):
        write(tmp_path / f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor", governor + "\n")
    found = machine.describe(tmp_path / "proc", tmp_path / "sys", tmp_path)
    assert found["cpu"] == "Abacus 9000"
    assert found["memory_gib"] == 16.0
    assert found["kernel"] == "6.1.0-test"
    assert found["governor"] == "performance, powersave"
    assert found["commit"] is None


def test_what_the_machine_does_not_tell_is_none_and_left_out_of_the_words(tmp_path: Path) -> None:
    found = machine.describe(tmp_path, tmp_path, tmp_path)
    assert found["cpu"] is found["memory_gib"] is found["kernel"] is found["governor"] is None
    words = machine.in_words(found)
    assert words.startswith("unknown CPU, ")
    assert "None" not in words
    assert "governor" not in words


def test_this_machine_is_described_as_json_can_carry_it() -> None:
    found = machine.describe()
    assert json.loads(json.dumps(found)) == found
    assert 1 <= found["usable_cores"] <= found["cores"]
    assert found["kernel"] in machine.in_words(found)


def test_commit_is_that_of_the_checkout_and_says_when_files_differ(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    package = tmp_path / "package"
    write(package / "__init__.py", "")
    git("init", "--quiet")
    assert machine.describe(source=package)["commit"] is None  # in somebody's checkout, not of it
    git("add", ".")
    git("commit", "--quiet", "--no-verify", "-m", "one")
    commit = git("rev-parse", "--short=12", "HEAD")
    assert machine.describe(source=package)["commit"] == commit
    write(package / "__init__.py", "changed = 1\n")
    assert machine.describe(source=package)["commit"] == f"{commit}-dirty"
