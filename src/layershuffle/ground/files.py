"""Files that are either whole or absent: written under a temporary name, flushed, then renamed.

A process killed at any moment leaves the old file or the new one, never half of one.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from layershuffle.ground.errors import LayerShuffleError, UsageError
from layershuffle.ground.text import shortened

LOG = logging.getLogger("layershuffle")
_STAGE_PREFIX = ".staged-"
_LOCK = ".lock"
_AT_FDCWD = -100  # of fcntl.h
_RENAME_EXCHANGE = 2  # of linux/fs.h
_NEARLY_FULL_BYTES = 1 << 20
_AGAIN = "free some space and run the same command again"
_ELSEWHERE = "choose another {flag}"
_MOUNTED = ("A mount point cannot be replaced", "name a place inside it")
_CAUSES = {
    errno.ENOSPC: ("The disk is full", _AGAIN),
    errno.EDQUOT: ("The disk quota is used up", _AGAIN),
    errno.EFBIG: (
        "A file would be larger than this shell or file system allows",
        "raise the limit of files (ulimit -f unlimited), or name a place on another file system",
    ),
    errno.EROFS: ("The file system is read-only", _ELSEWHERE),
    errno.EACCES: ("This user may not write here", _ELSEWHERE),
    errno.EPERM: ("This user may not write here", _ELSEWHERE),
    errno.ENOENT: ("There is no such place, and it cannot be made", _ELSEWHERE),
    errno.ENAMETOOLONG: ("The name is too long for this file system", _ELSEWHERE),
    errno.EISDIR: ("A directory stands where a file is needed", "name a file, not a directory"),
    errno.ENOTDIR: ("A file stands where a directory is needed", _ELSEWHERE),
    errno.EEXIST: ("A file stands where a directory is needed", _ELSEWHERE),
    errno.EBUSY: _MOUNTED,
    errno.EXDEV: _MOUNTED,
}
_LOCK_SECONDS = 90.0  # longer than a study gives its runs to save and end
_LOCK_POLL_SECONDS = 0.2


def user_path(path: str | Path, *, hint: str = "set HOME, or name a place without ~") -> Path:
    """`path` as a shell reads it: a tilde at its beginning is the home directory.

    Shells leave the tilde of `--out=~/run` and of `folder:~/data` as it is, so everything that a
    user names goes through here, whether it is read or written. Raises `UsageError` if nobody knows
    the home directory.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(
            "The home directory is unknown: HOME is not set, and this user has no entry in passwd",
            place=path,
            hint=hint,
        ) from error


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in UTF-8, in one step, as `write_bytes` does."""
    # Names of files may hold bytes that are no UTF-8.
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def write_bytes(path: Path, content: bytes, *, private: bool = False) -> None:
    """Replace `path` in one step. Raises `LayerShuffleError` if it cannot be written.

    `private`: no other user may read the file at any moment.
    """
    path = path.resolve()  # what a link leads to is replaced, not the link
    # Beside `path`: a rename is a single step only within one file system.
    # A random name: processes of containers that share a disk have equal numbers.
    stage = path.with_name(f"{_STAGE_PREFIX}{secrets.token_hex(4)}-{path.name}")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(stage, "wb", opener=_private_opener if private else None) as file:
                file.write(content)
                file.flush()
                # Before the rename: after a power cut the name must not lead to half a file.
                os.fsync(file.fileno())
            os.replace(stage, path)
        finally:
            stage.unlink(missing_ok=True)  # there only if something failed


def _private_opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o600)


@contextmanager
def staged_directory(final: Path) -> Iterator[Path]:
    """A new directory to fill; on leaving it is flushed and takes the place of `final`.

    If the block raises, nothing of it stays and `final` is as it was. Raises `LayerShuffleError`
    for a full disk or a read-only place.
    """
    final = final.resolve()  # what a link leads to is replaced, not the link
    with explained(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=_STAGE_PREFIX, dir=final.parent))
        # mkdtemp gives access to this user alone, and results are for everybody.
        os.chmod(stage, 0o755)
    try:
        with explained(final):
            yield stage
            _flush(stage)
            _replace_directory(stage, final)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def file_names(directory: Path) -> set[str]:
    """Names in `directory`, without our lock and what a killed process left half-written there."""
    names = set()
    for path in directory.iterdir():
        if path.name != _LOCK and not path.name.startswith(_STAGE_PREFIX):
            names.add(path.name)
    return names


def refuse_foreign(directory: Path, *, mark: str, kind: str) -> None:
    """Raise `UsageError` if `directory` holds files, and no file `mark` of a `kind` of ours.

    It is asked before `locked`, which leaves a file of its own there.
    """
    with explained(directory):
        if not directory.is_dir() or not file_names(directory):
            return
        if (directory / mark).is_file():
            return
    raise UsageError(
        f"The directory is not empty and holds no {kind}",
        place=directory,
        hint="give another --out",
    )


def refuse_others(directory: Path, *, ours: Iterable[str], kind: str) -> None:
    """Raise `UsageError` if `directory`, which will be replaced, holds what is not ours.

    It may be no file and no mount point, and every name in it has to match one of the patterns
    `ours`, those of the files of a `kind`.
    """
    if not directory.exists():
        return
    if directory.resolve().is_mount():
        cause, hint = _MOUNTED
        raise UsageError(cause, place=directory, hint=hint)
    others = [directory.name]
    if directory.is_dir():
        patterns = tuple(ours)
        others = []
        for name in sorted(file_names(directory)):
            if not any(fnmatchcase(name, pattern) for pattern in patterns):
                others.append(name)
    if others:
        raise UsageError(
            f"Writing here would delete what is no {kind} ({shortened(others)})",
            place=directory,
            hint=f"name another place, or an older {kind} to replace",
        )


def listed_files(summary: Path) -> set[str]:
    """The name of a JSON file of ours and those that it lists as its "files", as patterns.

    No names if it cannot be read, or lists none.
    """
    try:
        names = json.loads(summary.read_text(encoding="utf-8"))["files"]
        return {summary.name, *map(escape, names)}  # `refuse_others` takes patterns
    except (OSError, ValueError, TypeError, KeyError):
        return set()


def remove_stale_stages(directory: Path) -> None:
    """Delete what a killed process left half-written in `directory`."""
    for stage in sorted(directory.glob(f"{_STAGE_PREFIX}*")):
        if stage.is_dir():
            shutil.rmtree(stage)
        else:
            stage.unlink()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes of this package out of `directory`; a killed process frees the lock.

    Waits up to 90 seconds for a process that is about to end (it saves a checkpoint first), after
    a warning, then raises `LayerShuffleError`.
    """
    lock = FileLock(directory / _LOCK)
    with explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                LOG.warning(
                    "Another process is working in %s; waiting up to %.0f s for it to end.",
                    directory,
                    _LOCK_SECONDS,
                )
                lock.acquire(timeout=_LOCK_SECONDS, poll_interval=_LOCK_POLL_SECONDS)
        except Timeout as error:
            raise LayerShuffleError(
                "Another process is working in this directory",
                place=directory,
                hint="wait for it or end it, or choose another --out",
            ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def explained(place: Path, *, flag: str = "place") -> Iterator[None]:
    """Turn a full disk, a read-only place or a missing permission into one paragraph.

    `flag`: what the user named the place by, if that is certain: most places come from Python too.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        number = _error_number(error, place)
        if number not in _CAUSES:
            raise
        cause, hint = _CAUSES[number]
        # Of a rename the second name is the one that the user gave.
        second = getattr(error, "filename2", None)
        where = second or getattr(error, "filename", None) or place
        raise LayerShuffleError(cause, place=where, hint=hint.format(flag=flag)) from error


def _error_number(error: Exception, place: Path) -> int | None:
    """The system's error number behind what a saver raised."""
    if isinstance(error, OSError):
        return error.errno
    in_text = re.search(r"os error (\d+)", str(error))
    if in_text is not None:  # safetensors gives the number in its message alone
        return int(in_text[1])
    # torch's saver gives no number at all: a full disk or a limit is the likely cause.
    while not place.exists():
        place = place.parent
    if shutil.disk_usage(place).free <= _NEARLY_FULL_BYTES:
        return errno.ENOSPC
    if sys.platform == "win32":  # which has no such limit, and no such module
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and re.search("StreamWriter|inline_container", str(error)):
        return errno.EFBIG
    return None


def _replace_directory(stage: Path, final: Path) -> None:
    """Rename `stage` to `final`; the directory that was there before is deleted or in `stage`."""
    if not final.exists():
        os.replace(stage, final)
        return
    if _exchange(stage, final):
        return  # the old directory is now the stage, which the caller deletes
    # Without that system call there is a moment in which neither directory has the final name.
    with tempfile.TemporaryDirectory(prefix=_STAGE_PREFIX, dir=final.parent) as place:
        old = Path(place) / "old"
        os.replace(final, old)
        try:
            os.replace(stage, final)
        except OSError:
            os.replace(old, final)
            raise


def _exchange(stage: Path, final: Path) -> bool:
    """Swap two directories in one step, where Linux and the file system can."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(stage), _AT_FDCWD, os.fsencode(final), _RENAME_EXCHANGE)
    return bool(renameat2(*arguments) == 0)


def _flush(directory: Path) -> None:
    """Have the system write the files of a directory to the disk, readable for everybody."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            os.chmod(path, 0o644)  # some savers write for their user alone
            descriptor = os.open(path, os.O_RDWR)  # Windows flushes no file opened to read
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
