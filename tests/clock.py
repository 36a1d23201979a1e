"""Virtual time: an event loop whose clock jumps, so that tests do not feel a busy machine.

Only for work that is all in one event loop: a clock that jumps does not wait for threads. What is
handed to a thread runs at once, in no time.
"""

import asyncio
import selectors


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self):
        self.now = 0.0
        loop = self

        class Selector(selectors.SelectSelector):
            def select(self, timeout=None):
                assert timeout is not None, "everything waits, and nothing will happen"
                loop.now += max(0.0, timeout)
                return super().select(0)

        super().__init__(Selector())
        self._clock_resolution = 1e-12

    def time(self):
        return self.now

    def run_in_executor(self, executor, func, *args):
        del executor
        result = self.create_future()
        try:
            result.set_result(func(*args))
        except BaseException as error:  # noqa: BLE001 -- whatever it is, its caller awaits it
            result.set_exception(error)
        return result


def run_virtual(work):
    """The result of the coroutine `work`, in virtual time."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(work)


def loop_time():
    """Seconds of the running loop's clock: what a `Router` takes as its clock in virtual time."""
    return asyncio.get_running_loop().time()
