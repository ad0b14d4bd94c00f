"""Garbage collection is paused while stages are prepared, and goes on as the user has set it."""

import gc
import os
import threading
from contextlib import ExitStack

import pytest

from hf_specbranch.garbage_collection import no_garbage_collection

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.fixture
def other_thread():
    """Another thread pauses it meanwhile."""
    paused, end = threading.Event(), threading.Event()

    def pause():
        with no_garbage_collection():
            paused.set()
            end.wait()

    thread = threading.Thread(target=pause)
    thread.start()
    paused.wait()
    yield
    end.set()
    thread.join()
    assert gc.isenabled()


def in_child(look):
    """Return what a look at a forked process shows."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    shown = False
    try:
        shown = look()
    finally:  # also after an error
        os._exit(int(shown))


@pytest.mark.parametrize("enabled", [True, False])
def test_setting_of_the_user_is_restored(enabled):
    with ExitStack() as stack:
        if not enabled:
            gc.disable()
            stack.callback(gc.enable)
        with pytest.raises(ZeroDivisionError), no_garbage_collection(), no_garbage_collection():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() is enabled


@needs_fork
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_process_does_not_wait_for_threads_that_it_does_not_have(other_thread):
    def look():
        collects = gc.isenabled()
        with no_garbage_collection():
            pauses = not gc.isenabled()
        return collects and pauses and gc.isenabled()

    assert in_child(look)


@needs_fork
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_process_of_a_thread_that_pauses_it(other_thread):
    with ExitStack() as stack:
        stack.enter_context(no_garbage_collection())

        def look():
            paused = not gc.isenabled()
            stack.close()
            return paused and gc.isenabled()

        assert in_child(look)
