"""Virtual time for tests, so they neither wait nor depend on the load of the machine."""

import asyncio
from concurrent.futures import Executor, Future

from simulation.clock import VirtualTimeLoop


class ThreadlessLoop(VirtualTimeLoop):
    """A loop in virtual time that runs work for threads immediately, in no time."""

    def run_in_executor(self, executor, func, *args):
        del executor
        result = self.create_future()
        try:
            result.set_result(func(*args))
        except BaseException as error:  # noqa: BLE001 -- whatever it is, its caller awaits it
            result.set_exception(error)
        return result


class AtOnce(Executor):
    """An executor that runs work in `submit`, for code with its own threads in virtual time."""

    def submit(self, fn, /, *args, **options):
        result = Future()
        try:
            result.set_result(fn(*args, **options))
        except BaseException as error:  # noqa: BLE001 -- whatever it is, its caller awaits it
            result.set_exception(error)
        return result


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop in real time, for work in real threads and over sockets, whose clock a test moves.

    So that a deadline passes when the test says so, a test sets one that no machine reaches.
    """

    skipped = 0.0

    def time(self):
        return super().time() + self.skipped

    def skip(self, seconds):
        self.skipped += seconds


def run_virtual(work):
    """The result of the coroutine `work`, in virtual time."""
    with asyncio.Runner(loop_factory=ThreadlessLoop) as runner:
        return runner.run(work)


def loop_time():
    """Seconds of the running loop's clock, the clock of a `Router` in virtual time."""
    return asyncio.get_running_loop().time()
