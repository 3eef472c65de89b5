"""The policy of docs/how-to/own-policy.md, word by word, as a package that is installed outside of the tree."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "how-to" / "own-policy.md").read_text(encoding="utf-8")
FILE, USE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def install(directory: Path, file: str = FILE) -> dict[str, str]:
    """Writes what pip would write; returns the environment in which Python finds it.

    Args:
        directory: in place of site-packages.
        file: the module.
    """
    (project,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    group, entry = re.search(r'\[project\.entry-points\."(.+)"\]\n(.+)\n', project).groups()
    (directory / "busier.py").write_text(file)
    told = directory / "busier-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: busier\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text(f"[{group}]\n{entry}\n".replace('"', ""))
    return os.environ | {"PYTHONPATH": f"{directory}:{ROOT}"}
