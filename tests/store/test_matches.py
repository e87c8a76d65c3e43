from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.store.matches import ID_BYTES, Matches, MatchMemory, distances, unit


def _matches(count: int) -> Matches:
    return Matches(dict.fromkeys(f"n{at}" for at in range(count)))


def _never() -> Matches:
    raise AssertionError("it is known")


def test_the_least_recently_used_goes_first() -> None:
    """What is kept stays under the bound; what was asked for last stays longest."""
    memory = MatchMemory(max_bytes=30 * ID_BYTES)
    for key in ("a", "b", "c"):
        memory.get(key, 1, lambda: _matches(10), seconds=None)
    memory.get("a", 1, _never, seconds=None)
    memory.get("d", 1, lambda: _matches(10), seconds=None)
    assert len(memory) == 3
    assert memory.nbytes == 30 * ID_BYTES
    memory.get("a", 1, _never, seconds=None)
    with pytest.raises(AssertionError, match="it is known"):
        memory.get("b", 1, _never, seconds=None)


def test_what_is_too_large_alone_is_not_kept() -> None:
    """It is given all the same."""
    memory = MatchMemory(max_bytes=10 * ID_BYTES)
    assert len(memory.get("a", 1, lambda: _matches(11), seconds=None).ids) == 11
    assert len(memory) == 0


def test_vectors_count_once_they_are_there() -> None:
    """Matches that grew are counted anew, and others go for them."""
    memory = MatchMemory(max_bytes=1000 * ID_BYTES)
    memory.get("a", 1, lambda: _matches(10), seconds=None)
    grown = memory.get("b", 1, lambda: _matches(10), seconds=None)
    grown.vectors = np.zeros((10, 3_700), dtype=np.float32)
    memory.keep("b", 1, grown)
    assert len(memory) == 1
    assert memory.nbytes == 10 * ID_BYTES + 10 * 3_700 * 4


def test_another_version_is_loaded_anew() -> None:
    """The older one is not kept beside it."""
    memory = MatchMemory()
    memory.get("a", 1, lambda: _matches(1), seconds=None)
    assert len(memory.get("a", 2, lambda: _matches(2), seconds=None).ids) == 2
    assert len(memory) == 1


def test_one_thread_loads_and_the_others_wait() -> None:
    """Sixteen searches under one new filter read its rows once."""
    memory, loads = MatchMemory(), []

    def load() -> Matches:
        loads.append(threading.get_ident())
        time.sleep(0.05)
        return _matches(1)

    threads = [threading.Thread(target=memory.get, args=("a", 1, load), kwargs={"seconds": 5}) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1


def test_nobody_waits_longer_than_asked() -> None:
    """A load that hangs costs the others their time and no more; a load that fails lets the next one try."""
    memory, free, begun = MatchMemory(), threading.Event(), threading.Event()

    def hangs() -> Matches:
        begun.set()
        assert free.wait(10)
        raise OSError("gone")

    def first() -> None:
        with pytest.raises(OSError, match="gone"):
            memory.get("a", 1, hangs, seconds=None)

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(5)
    for seconds in (0.05, -1.0):
        with pytest.raises(DeadlineExceededError, match="another search"):
            memory.get("a", 1, _never, seconds=seconds)
    free.set()
    thread.join()
    assert len(memory.get("a", 1, lambda: _matches(1), seconds=1).ids) == 1


def test_distances() -> None:
    """The three that Chroma has, as its documentation defines them."""
    rows = np.array([[3.0, 4.0], [0.0, 2.0]], dtype=np.float32)
    query = np.array([0.0, 2.0], dtype=np.float32)
    assert distances(rows, query, "l2").tolist() == [13.0, 0.0]
    assert distances(rows, query, "ip").tolist() == [-7.0, -3.0]
    assert distances(unit(rows), query, "cosine").tolist() == pytest.approx([0.2, 0.0], abs=1e-6)
    assert unit(np.zeros((1, 2), dtype=np.float32)).tolist() == [[0.0, 0.0]]
