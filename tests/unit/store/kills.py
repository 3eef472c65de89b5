"""Kills a process at each thing that it does to files, one after the other."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

WATCHED = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.listdir", "os.scandir", "a.part"}


def kills(action: Callable[[], None], root) -> Iterator[int]:
    """Lets a forked child run ``action``, and kills it before the first, the second, ... time that it touches ``root``.

    Yields the number of the step, after the kill, as long as the child does not reach the end.  Opening, renaming,
    removing, making and listing are steps; and so is whatever says ``sys.audit("a.part")``.
    """
    step = 1
    while not _ends(action, str(root), step):
        yield step
        step += 1
    assert step > 1, "the action touches no file"


def _ends(action, root: str, step: int) -> bool:
    child = os.fork()
    if child == 0:
        try:
            sys.addaudithook(_killer(root, step))
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0, "the action failed: see above"
    return True


def _killer(root: str, step: int):
    left = step

    def hook(event: str, arguments: tuple) -> None:
        nonlocal left
        if event in WATCHED and (event == "a.part" or _touches(root, arguments)):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def _touches(root: str, arguments: tuple) -> bool:
    # rmtree works relative to a descriptor of a directory, so that only a name is seen
    return any(isinstance(a, (str, os.PathLike)) and (str(a).startswith(root) or "/" not in str(a)) for a in arguments)
