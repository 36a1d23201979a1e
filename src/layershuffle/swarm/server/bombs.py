"""What makes small files dear to decode although their pixels are few. Pure.

Pillow unpacks every compressed text and profile of a PNG (16 such files of 66 kB: 6 s), and libjpeg
goes over the whole image once per scan of a JPEG, of which 42 bytes are enough: 16 MB hold hours.
"""

from __future__ import annotations

import re

MOST_SCANS = 32
"""Of a JPEG. Progressive ones have about ten."""
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
_TRANSPARENCY = b"tRNS"
# Not bytes within a scan: a stuffed zero, restarts, filling.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_SCAN, _END, _TEMPORARY = 0xDA, 0xD9, 0x01


def lean(file: bytes) -> bytes:
    """A PNG without the chunks that its pixels do not need; other files as they are."""
    if not file.startswith(_PNG):
        return file
    parts, at = [_PNG], len(_PNG)
    while at + 8 <= len(file):
        kind = file[at + 4 : at + 8]
        end = at + 12 + int.from_bytes(file[at : at + 4])
        if kind[:1].isupper() or kind == _TRANSPARENCY:  # upper case: no decoder may skip it
            parts.append(file[at:end])
        at = end
    return b"".join(parts)


def scans_of(file: bytes) -> int:
    """The scans of a JPEG, counted up to one more than `MOST_SCANS`; 0 for other files."""
    count = 0
    found = _MARKER.search(file, 2) if file.startswith(_JPEG) else None
    while found is not None and count <= MOST_SCANS:
        kind, at = file[found.start() + 1], found.end()
        if kind == _END:
            break
        count += kind == _SCAN
        length = 0 if kind == _TEMPORARY else int.from_bytes(file[at : at + 2])
        found = _MARKER.search(file, at + length)
    return count
