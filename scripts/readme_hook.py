"""Build hook: package indexes show README.md without the files that its links lead to.

hatchling calls it for the metadata of wheel and sdist, where every relative link becomes one to the
repository that pyproject.toml names.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)")


class ReadmeHook(MetadataHookInterface):
    """What hatchling looks for in this file."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        content = with_absolute_links(text, metadata["urls"]["Repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": content}


def with_absolute_links(text: str, repository: str) -> str:
    """Markdown with links to the files of `repository`; pictures lead to the files themselves."""

    def absolute(link: re.Match[str]) -> str:
        mark, label, target = link.groups()
        return f"{mark}[{label}]({repository}/{'raw' if mark else 'blob'}/main/{target})"

    return _LINK.sub(absolute, text)
