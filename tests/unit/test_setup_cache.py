"""The cache of Horovod's wheels: what an entry is for, and that it is finished or absent."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import setup_env
from horovod_compress.building import horovod_wheel
from horovod_compress.building.file_lock import file_lock
from horovod_compress.building.logged_command import Stopped
from horovod_compress.building.wheel_cache import BuildFacts, WheelCache, default_folder
from tests.support.setup import FACTS, make_runner


def test_key_is_a_function_of_the_facts():
    assert FACTS.key() == dataclasses.replace(FACTS).key()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(BuildFacts)])
def test_key_changes_with_every_fact(field):
    other = (("HOROVOD_WITH_MPI", "1"),) if field == "options" else "something else"
    assert dataclasses.replace(FACTS, **{field: other}).key() != FACTS.key()


def test_key_tells_builds_of_one_torch_version_apart():
    assert FACTS.key() != dataclasses.replace(FACTS, torch="2.13.0+cu130").key()
    assert FACTS.key().startswith("horovod-0.28.1-torch-2.13.0+cpu-cpython-311")
    assert "/" not in FACTS.key()


def test_cache_follows_the_xdg_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "horovod-compress" / "wheels"


def test_run_time_settings_of_horovod_are_no_build_options():
    assert horovod_wheel.build_options({"HOROVOD_CYCLE_TIME": "1", "HOROVOD_GLOO_IFACE": "eth0"}) == (
        horovod_wheel.OPTIONS
    )


def test_build_options_of_the_user_win():
    options = horovod_wheel.build_options({"HOROVOD_WITH_MPI": "1", "HOROVOD_CPU_OPERATIONS": "MPI"})
    assert options["HOROVOD_CPU_OPERATIONS"] == "MPI"
    assert "HOROVOD_WITHOUT_MPI" not in options


def test_wheel_appears_only_when_stored(tmp_path):
    cache, key = WheelCache(tmp_path), FACTS.key()
    with cache.locked(key, print, lambda: None), cache.workplace(key) as folder:
        built = folder / "wheel"
        built.mkdir()
        (built / "horovod.whl").write_text("wheel")
        assert cache.find(key) is None
        stored = cache.store(key, built, FACTS)
    assert cache.find(key) == stored
    assert stored.read_text() == "wheel"


def test_interrupted_build_leaves_nothing(tmp_path):
    cache, key = WheelCache(tmp_path), FACTS.key()
    with pytest.raises(KeyboardInterrupt), cache.workplace(key) as folder:
        (folder / "horovod.whl").write_text("half a wh")
        raise KeyboardInterrupt
    assert cache.find(key) is None
    assert not folder.exists()


def test_remains_of_a_killed_build_are_removed_first(tmp_path):
    cache, key = WheelCache(tmp_path), FACTS.key()
    with cache.workplace(key) as folder:
        pass
    folder.mkdir()
    (folder / "horovod.whl").write_text("half a wh")
    assert cache.find(key) is None
    with cache.workplace(key) as again:
        assert again != folder
        assert list(again.iterdir()) == []
        assert not folder.exists()


def test_storing_no_wheel_is_an_error(tmp_path):
    cache = WheelCache(tmp_path / "cache")
    with cache.workplace(FACTS.key()) as folder:
        (folder / "wheel").mkdir()
        with pytest.raises(FileNotFoundError, match="left no wheel"):
            cache.store(FACTS.key(), folder / "wheel", FACTS)


def test_workplace_has_no_name_that_build_systems_misread(tmp_path):
    with WheelCache(tmp_path).workplace(FACTS.key()) as folder:
        assert "+" not in folder.name


def test_wheel_without_its_library_is_recognised(tmp_path):
    wheel = tmp_path / "horovod.whl"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr("home/me/horovod/torch/mpi_lib_v2.so", "in the wrong place")
    assert not horovod_wheel.contains(wheel, horovod_wheel.LIBRARY)


def test_second_process_waits_for_the_lock_and_says_so(tmp_path):
    lock = tmp_path / "lock"
    script = (
        "from pathlib import Path; from horovod_compress.building.file_lock import file_lock\n"
        f"with file_lock(Path({str(lock)!r}), 'busy'): print('mine')"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(setup_env.__file__).parent)}
    with file_lock(lock, "busy"):
        second = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
        assert second.stdout is not None
        assert second.stdout.readline() == "waiting for another process that is busy ...\n"
    rest, _ = second.communicate(timeout=30)
    assert rest == "mine\n"


def test_a_command_that_goes_on_does_not_keep_the_lock(tmp_path):
    """The other lane's compilers inherit it, and have nothing to do with it."""
    with file_lock(tmp_path / "lock", "busy"):
        other = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with file_lock(tmp_path / "lock", "busy", pytest.fail):
            pass
    finally:
        other.kill()
        other.wait()


def test_commands_hold_the_lock_too(tmp_path):
    with file_lock(tmp_path / "lock", "busy"):
        runner = make_runner(tmp_path)
        runner.run(["sh", "-c", "readlink /proc/self/fd/* /proc/$$/fd/*; true"], phase="horovod")
    assert str(tmp_path / "lock") in runner.log("horovod").read_text()


def test_waiting_for_the_lock_ends_with_the_set_up(tmp_path):
    said, runner = [], make_runner(tmp_path)
    with file_lock(tmp_path / "lock", "busy"), pytest.raises(Stopped):
        runner.stop()
        with file_lock(tmp_path / "lock", "busy", said.append, runner.pause):
            pytest.fail("two hold one lock")
    assert said == ["waiting for another process that is busy ..."]
