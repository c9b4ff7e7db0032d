"""deploy/compose without containers: its services' command lines, secrets and checks, as processes."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvxfer.bench.errors import BenchError

_FOLDER = Path(__file__).resolve().parents[2] / "deploy"


class Compose:
    """What compose.yaml says, with paths of this machine where it has those of containers.

    Parameters
    ----------
    folder
        Takes secrets, configurations, and what each service keeps, in a folder of its name.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import yaml
        except ImportError:
            raise BenchError(
                "the cluster needs PyYAML, which is installed with vLLM: run make cluster"
            ) from None
        if not _FOLDER.is_dir():
            raise BenchError(f"there is no {_FOLDER}: run make cluster in a checkout")
        self._folder = folder
        own = folder / "compose"
        shutil.copytree(_FOLDER / "compose", own, ignore=shutil.ignore_patterns("private"))
        subprocess.run([own / "prepare"], check=True, capture_output=True, timeout=60)
        self._document: dict[str, Any] = yaml.safe_load((own / "compose.yaml").read_text())
        self._secrets = {
            f"/run/secrets/{name}": str(own / each["file"])
            for name, each in self._document["secrets"].items()
        }

    def secret(self, name: str) -> Path:
        """Returns the file of a secret."""
        return Path(self._secrets[f"/run/secrets/{name}"])

    def kept(self, service: str, path: str) -> Path:
        """Returns where a service keeps what it keeps at that path in its container."""
        return self._folder / service / path.strip("/").replace("/", "-")

    def command(self, service: str) -> list[str]:
        """Returns the command line of a service, which begins with what its image does not begin with."""
        return [self._here(service, word) for word in self._document["services"][service]["command"]]

    def check(self, service: str) -> list[str]:
        """Returns the command that asks whether a service is well."""
        _, *words = self._document["services"][service]["healthcheck"]["test"]
        return [self._here(service, word) for word in words]

    def prometheus(self) -> Path:
        """Writes the configuration of Prometheus, and returns its path."""
        shutil.copy(_FOLDER / "prometheus" / "alerts.yaml", self._folder)
        text = (_FOLDER / "compose" / "prometheus.yaml").read_text()
        for path, here in self._secrets.items():
            text = text.replace(path, here)
        # A cluster that is looked at for minutes.
        file = self._folder / "prometheus.yaml"
        file.write_text(text.replace("interval: 15s", "interval: 1s"))
        return file

    def _here(self, service: str, word: str) -> str:
        for path, here in self._secrets.items():
            word = word.replace(path, here)
        for path in self._volumes(service):
            self.kept(service, path).parent.mkdir(exist_ok=True)
            # Behind a slash it is a part of a URL.
            word = re.sub(f"(?<!/){re.escape(path)}", str(self.kept(service, path)), word)
        return word

    def _volumes(self, service: str) -> Sequence[str]:
        volumes = [each.split(":") for each in self._document["services"][service].get("volumes", ())]
        return [path for name, path, *_ in volumes if not name.startswith(".")]
