"""`layershuffle cache DATA`: a copy of the images at the size that training needs."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from shlex import quote

from layershuffle.cli.command import Command, Inline
from layershuffle.settings import CacheSettings
from layershuffle.text import counted, shortened


@dataclass(frozen=True)
class CacheCommand(Command):
    """Copy image data as JPEG files of the size that training needs, to read them faster.

    fit and eval read the copy as folder:DIR. You can stop this command at any time; run it again to
    continue.
    """

    data: str
    """The images: folder:DIR, hf:NAME_OR_DIR, wds:SHARDS or cifar100:DIR."""
    _: KW_ONLY
    out: Path | None = None
    """Directory of the copy (default: the source's name with the size, beside it or here)."""
    verify: bool = False
    """Read every image of the copy back and compare checksums."""
    settings: Inline[CacheSettings] = field(default_factory=CacheSettings)

    def run(self) -> int:
        """Make the cache, or report that it exists; verify it if --verify is given."""
        from layershuffle.cli.progress import shown_progress
        from layershuffle.data.cache import build_cache, default_out, verify_cache
        from layershuffle.data.loading import loader_processes

        settings = self.settings
        out = self.out or default_out(self.data, settings.size)
        with shown_progress("cache") as progress:
            report = build_cache(self.data, out, settings=settings, progress=progress)
        images = ", ".join(f"{count:,} {folder}" for folder, count in report.images.items())
        print(
            f"{images} images in {report.out} ({report.bytes / 1e9:.2f} GB), "
            f"{report.written:,} of them made now"
        )
        if report.skipped:
            names = shortened(report.skipped, limit=5)
            print(f"note: left out {counted(len(report.skipped), 'unreadable image')}: {names}")
        if self.verify:
            # Reading back is bound by decoding too, so it takes as many processes as writing did.
            processes = loader_processes() if settings.workers is None else settings.workers
            with shown_progress("verify") as progress:
                count = verify_cache(out, processes=processes, progress=progress)
            print(f"All {count:,} images are as they were written")
        # Quoted, because directory names may hold spaces and the line is meant to be copied.
        print(f"Next: layershuffle fit --data {quote(f'folder:{out}')} ...")
        return 0
