"""Beside other work: how busy others are, a run that gets slower, threads that sleep while others need the cores."""

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from speedrun.training import load
from speedrun.training.load import Load, Pace, SleepWhileBusy, busy_line


@pytest.fixture
def busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    process.kill()
    process.wait()


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_what_this_process_and_its_children_do_is_not_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are busy for two seconds of CPU time here, whatever the machine really does."""
    clock = iter([(0.0, 100.0, 10.0), (4.0, 108.0, 16.0)])
    monkeypatch.setattr(Load, "_now", staticmethod(lambda: next(clock)))
    assert Load().others() == pytest.approx(0.5)


def test_the_seconds_of_this_process_and_of_its_children_are_counted() -> None:
    before = load._own_seconds()
    spin(0.3)
    child = subprocess.Popen(
        [sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass\ninput()"], stdin=-1
    )
    for _ in range(200):
        if load._own_seconds() - before > 0.55:
            break
        time.sleep(0.05)
    alive = load._own_seconds() - before
    child.communicate(b"\n")
    assert alive > 0.55, "a child that is still there"
    assert load._own_seconds() - before >= alive - 0.02, "and one that has ended"


def test_a_busy_process_is_seen(busy_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_own_seconds", time.process_time)  # the busy one is a child here, and must not count
    others, found = Load(), 0.0
    for _ in range(100):
        time.sleep(0.1)
        found = others.others() or 0.0
        if found > load.BUSY:
            break
    line = busy_line(found)
    assert line is not None
    assert line.startswith(f"busy machine: other processes keep {found:.1f} of {load.usable_cores()} cores busy")


def test_a_quiet_machine_is_not_worth_a_line() -> None:
    assert busy_line(0.2) is None
    assert busy_line(None) is None


def test_a_system_that_tells_nothing_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_all_seconds", lambda: (_ for _ in ()).throw(PermissionError()))
    assert Load().others() is None
    with SleepWhileBusy(2) as threads:
        threads._watcher.join(5)
        assert not threads.sleeping


def test_a_run_that_gets_slower_is_told_once() -> None:
    pace, seconds, told = Pace(), 0.0, []
    for step in range(400):
        seconds += 0.125 if step < 160 or step >= 350 else 0.5
        line = pace.after(1000, seconds)
        told += [(step, line)] if line else []
    assert [step for step, _ in told] == [179]
    assert told[0][1] == "slower: 2,000 tokens per second in the last 10 s, up to 8,000 before"


def test_threads_sleep_while_others_are_busy_and_spin_again_after_that(monkeypatch: pytest.MonkeyPatch) -> None:
    work = {"others": 0.0}
    start = time.monotonic()

    def now() -> tuple[float, float, float]:
        seconds = time.monotonic() - start
        return seconds, work["others"], 0.0

    monkeypatch.setattr(load, "GLANCE", 0.02)
    monkeypatch.setattr(Load, "_now", staticmethod(now))
    before = threading.active_count()
    with SleepWhileBusy(2) as threads:
        for busy in (True, False, True):
            for _ in range(500):
                work["others"] += 0.1 * busy
                time.sleep(0.01)
                if threads.sleeping == busy:
                    break
            assert threads.sleeping == busy
    assert threading.active_count() == before, "its threads end with it"
    assert not threads.sleeping


def test_one_thread_has_nobody_to_wait_for() -> None:
    before = threading.active_count()
    with SleepWhileBusy(1):
        assert threading.active_count() == before


def test_it_really_lets_threads_sleep() -> None:
    """In a process with two threads: CPU time of short pauses between parallel work, with and without."""
    script = """
        import time, torch
        from speedrun.training.load import SleepWhileBusy
        torch.set_num_threads(2)
        x = torch.ones(2**18)

        def seconds():
            before = time.process_time()
            for _ in range(60):
                x.add_(1)
                time.sleep(0.002)  # the other thread spins or sleeps, this one sleeps
            return time.process_time() - before

        waiting = SleepWhileBusy(2)
        times = {True: [], False: []}
        seconds()
        for _ in range(3):
            for sleep in (True, False):
                waiting._let(sleep)
                times[sleep].append(seconds())
        waiting._let(False)
        print(min(times[True]), min(times[False]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    asleep, spinning = map(float, done.stdout.split())
    if spinning < 0.08:
        pytest.skip(f"threads of this OpenMP do not spin ({spinning:.3f} s of CPU time)")
    assert asleep < spinning / 2
