import multiprocessing
import time

import pytest

from kvpass.models.cache import cache_root, verified

SOURCE = "a" * 64


class _Builder:
    def __init__(self):
        self.calls = 0

    def __call__(self, folder):
        self.calls += 1
        (folder / "weights").write_bytes(b"0123456789" * 100)
        (folder / "config").write_text("{}")


def test_built_once(tmp_path):
    """An intact directory is returned without building again, and nothing else is left beside it."""
    build = _Builder()
    for _ in range(2):
        folder = verified(tmp_path / "deep" / "m", SOURCE, build)
    assert build.calls == 1
    assert {path.name for path in folder.iterdir()} == {"weights", "config", "manifest.json"}
    assert {path.name for path in folder.parent.iterdir()} <= {"m", "m.lock"}


def _truncate(folder):
    (folder / "weights").write_bytes(b"012")


def _flip(folder):
    data = bytearray((folder / "weights").read_bytes())
    data[7] ^= 1
    (folder / "weights").write_bytes(data)


def _remove(folder):
    (folder / "weights").unlink()


def _no_manifest(folder):
    (folder / "manifest.json").unlink()


def _bad_manifest(folder):
    (folder / "manifest.json").write_text('{"format": 1')


def _wrong_manifest(folder):
    (folder / "manifest.json").write_text("[]")


DAMAGE = [_truncate, _flip, _remove, _no_manifest, _bad_manifest, _wrong_manifest]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_rebuilt(tmp_path, capsys, damage):
    """A damaged directory is rebuilt with exactly one line on stderr, then counts as intact."""
    build = _Builder()
    folder = verified(tmp_path / "m", SOURCE, build)
    assert capsys.readouterr().err == ""
    damage(folder)
    verified(tmp_path / "m", SOURCE, build)
    assert build.calls == 2
    err = capsys.readouterr().err
    assert err.startswith(f"kvpass: rebuilding {folder}: ")
    assert err.count("\n") == 1
    verified(tmp_path / "m", SOURCE, build)
    assert build.calls == 2


def test_another_source_is_rebuilt(tmp_path):
    """A directory made from another source is not reused."""
    build = _Builder()
    verified(tmp_path / "m", SOURCE, build)
    verified(tmp_path / "m", "b" * 64, build)
    assert build.calls == 2


def test_failed_build_leaves_nothing(tmp_path):
    """A build that fails raises its own error and leaves no directory, whole or partial."""

    def fail(folder):
        (folder / "weights").write_bytes(b"half")
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        verified(tmp_path / "m", SOURCE, fail)
    assert {path.name for path in tmp_path.iterdir()} <= {"m.lock"}


def test_abandoned_attempt_is_swept(tmp_path):
    """What a killed build left behind is removed by the next one."""
    (tmp_path / ".m.new-killed").mkdir()
    (tmp_path / ".m.new-killed" / "weights").write_bytes(b"half")
    verified(tmp_path / "m", SOURCE, _Builder())
    assert not (tmp_path / ".m.new-killed").exists()


def _build_slowly(folder):
    time.sleep(0.3)
    (folder.parent / f"built-by-{multiprocessing.current_process().pid}").touch()
    (folder / "weights").write_bytes(b"x")


def _take(directory):
    verified(directory, SOURCE, _build_slowly)


def test_two_processes_build_once(tmp_path):
    """Two processes that want the same directory at once build it once."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_take, args=(tmp_path / "m",)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(list(tmp_path.glob("built-by-*"))) == 1


def test_root_follows_xdg(monkeypatch, tmp_path):
    """The root is under XDG_CACHE_HOME when that is absolute, under ~/.cache otherwise."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "kvpass" / "models"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_root() == tmp_path / "home" / ".cache" / "kvpass" / "models"
