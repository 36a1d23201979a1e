"""Build hook that makes the relative links of README.md absolute for package indexes.

hatchling calls it for the metadata of wheel and sdist. Links then lead to the repository in
pyproject.toml.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)")


class ReadmeHook(MetadataHookInterface):
    """The metadata hook that hatchling finds in this file."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme in `metadata`."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        content = with_absolute_links(text, metadata["urls"]["Repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": content}


def with_absolute_links(text: str, repository: str) -> str:
    """Markdown with links to the files of `repository`; those of pictures are to the raw files."""

    def absolute(link: re.Match[str]) -> str:
        mark, label, target = link.groups()
        return f"{mark}[{label}]({repository}/{'raw' if mark else 'blob'}/main/{target})"

    return _LINK.sub(absolute, text)
