import json
import subprocess
from pathlib import Path

from kvxfer.bench.report import machine


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_this_machine_is_described_as_json_can_carry_it() -> None:
    found = machine.describe()
    assert json.loads(json.dumps(found)) == found
    assert 1 <= found["usable_cores"] <= found["cores"]
    assert found["kernel"] in machine.in_words(found)
    unknown = {**found, **dict.fromkeys(("cpu", "commit"))}
    assert "None" not in machine.in_words(unknown)


def test_commit_is_that_of_the_checkout_and_says_when_files_differ(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    package = tmp_path / "package"
    write(package / "__init__.py", "")
    git("init", "--quiet")
    assert machine.describe(source=package)["commit"] is None  # inside a checkout, but not a part of it
    git("add", ".")
    git("commit", "--quiet", "--no-verify", "-m", "one")
    commit = git("rev-parse", "--short=12", "HEAD")
    assert machine.describe(source=package)["commit"] == commit
    write(package / "__init__.py", "changed = 1\n")
    assert machine.describe(source=package)["commit"] == f"{commit}-dirty"
