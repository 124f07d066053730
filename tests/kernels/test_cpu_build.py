"""Building and loading the CPU kernels, and their memory safety."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvpass.kernels import cpu
from kvpass.kernels.cpu import build

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A one-line library in place of the kernels, with its own cache."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "HERE", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("KVPASS_NO_CPP", raising=False)
    return tmp_path


def compiler(path: Path, body: str) -> str:
    """A shell script that stands in for a compiler."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def load():
    """The library and the reason, without the memory of earlier loads."""
    return build._load.__wrapped__()


def test_no_compiler(tiny, monkeypatch):
    """Without a compiler the kernels are unavailable with a reason, and nothing is raised."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load() == (None, "no C++ compiler: no-such-compiler not found")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    library, reason = load()
    assert library is None and "no C++ compiler" in reason


def test_failing_compiler(tiny, monkeypatch):
    """A compiler that fails leaves its message as the reason and nothing in the cache."""
    script = compiler(tiny / "cxx", 'case "$1" in --version) echo 1;; *) echo "it broke" >&2; exit 1;; esac')
    monkeypatch.setenv("CXX", script)
    library, reason = load()
    assert library is None and "it broke" in reason
    assert not list((tiny / "cache").rglob("*.so"))


def test_unwritable_cache(tiny, monkeypatch):
    """A cache directory that cannot be made is a reason, not an error."""
    (tiny / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny / "file"))
    assert load()[0] is None and load()[1]


def test_switched_off(tiny, monkeypatch):
    """KVPASS_NO_CPP=1 turns the kernels off."""
    monkeypatch.setenv("KVPASS_NO_CPP", "1")
    assert load() == (None, "KVPASS_NO_CPP is set")


@needs_compiler
def test_built_once(tiny, capfd):
    """The library is compiled at first use with one line of notice, then taken from the cache."""
    for _ in range(2):
        library, reason = load()
        assert reason is None and library.answer() == 42
    assert capfd.readouterr().err.count("compiling") == 1
    (tiny / "sources" / "tiny.cpp").write_text('extern "C" int answer() { return 43; }\n')
    assert load()[0].answer() == 43
    assert capfd.readouterr().err.count("compiling") == 1


@needs_compiler
def test_without_native(tiny, monkeypatch):
    """A compiler that knows no -march=native still builds."""
    script = compiler(tiny / "cxx", 'case "$*" in *-march=native*) exit 1;; *) exec g++ "$@";; esac')
    monkeypatch.setenv("CXX", script)
    assert load()[0].answer() == 42


@needs_compiler
def test_builders_do_not_collide(tiny, capfd):
    """Simultaneous first uses compile once."""
    results = []
    threads = [threading.Thread(target=lambda: results.append(load()[0].answer())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [42] * 4
    assert capfd.readouterr().err.count("compiling") == 1
    assert [p.suffix for p in (tiny / "cache").rglob("*") if p.is_file()].count(".so") == 1


def test_import_does_no_work(tmp_path):
    """Importing the package neither compiles nor loads anything."""
    code = "import kvpass.kernels.cpu.build as b; assert b._load.cache_info().currsize == 0"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_one_openmp_runtime():
    """The kernels share torch's OpenMP runtime: a second copy would be a second pool of threads."""
    if not cpu.available():
        pytest.skip(str(cpu.why_not()))
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(paths) <= 1


SANITIZE_MAIN = r"""
#include "attend.cpp"

#include <cstdio>

extern "C" int kvpass_linears(const int64_t* args, int64_t count);  // LinearArgs: 8-byte fields only

using kvpass::bytes_of;

// Each tensor is its own heap block of the exact size, so that one value read too far is an error.
static char* block(int64_t values, int64_t type, unsigned pattern) {
  char* p = new char[values * bytes_of(type)];
  for (int64_t i = 0; i < values; i++) {
    if (type == 0) ((float*)p)[i] = ((i * pattern) % 17) * 0.1f - 0.8f;
    else ((uint16_t*)p)[i] = 0x3800 + (i * pattern) % 31;
  }
  return p;
}

static void attend(int64_t model, int64_t storage, int64_t dk, int64_t dv, int64_t tokens, int64_t slots) {
  const int64_t B = 2, Hkv = 2, G = 3, Hq = Hkv * G, N = 700;
  kvpass::AttendArgs a = {};
  const int64_t len[4] = {600, 0, 1, 99};
  int64_t* start = new int64_t[4];
  int32_t* length = new int32_t[4];
  for (int64_t i = 0, at = 0; i < 4; at += len[i++]) start[i] = at, length[i] = len[i];
  int32_t *q_pos = new int32_t[B * tokens], *tail_pos = new int32_t[B * slots];
  for (int64_t i = 0; i < B * tokens; i++) q_pos[i] = i == 0 ? -1 : 20 + i % tokens;
  for (int64_t i = 0; i < B * slots; i++) tail_pos[i] = i % 3 ? 20 - slots + i % slots : -1;
  int64_t* at = new int64_t[1]{slots > 1 ? 1 : 0};
  float *votes = (float*)block(N, 0, 3), *sinks = (float*)block(Hq, 0, 5);
  char* owned[] = {
      block(B * Hq * tokens * dk, model, 7), block(B * Hkv * tokens * dk, model, 5),
      block(B * Hkv * tokens * dv, model, 3), block(N * dk, storage, 11), block(N * dv, storage, 13),
      block(B * Hkv * slots * dk, storage, 7), block(B * Hkv * slots * dv, storage, 5),
      block(B * tokens * Hq * dv, model, 1)};
  a.q = owned[0], a.k_new = owned[1], a.v_new = owned[2], a.store_k = owned[3], a.store_v = owned[4];
  a.tail_k = owned[5], a.tail_v = owned[6], a.out = owned[7];
  a.q_pos = q_pos, a.tail_pos = tail_pos, a.tail_at = at, a.log_votes = votes, a.sinks = sinks;
  a.row_start = start, a.row_len = length;
  a.batch = B, a.heads = Hq, a.tokens = tokens, a.key_dim = dk, a.kv_heads = Hkv, a.value_dim = dv;
  a.tail_slots = slots, a.q_pos_stride = tokens, a.tail_pos_stride = slots, a.store_k_stride = dk;
  a.store_v_stride = dv, a.model_type = model, a.store_type = a.tail_type = storage;
  auto strides = [](int64_t* s, int64_t heads, int64_t n, int64_t d) {
    s[0] = heads * n * d, s[1] = n * d, s[2] = d;
  };
  strides(a.q_stride, Hq, tokens, dk), strides(a.k_new_stride, Hkv, tokens, dk);
  strides(a.v_new_stride, Hkv, tokens, dv);
  strides(a.tail_k_stride, Hkv, slots, dk), strides(a.tail_v_stride, Hkv, slots, dv);
  a.window = slots, a.tile = 128, a.threads = 2, a.scale = 0.125, a.softcap = dk % 16 ? 5 : 0;
  if (kvpass_attend(&a)) std::puts("no memory"), std::exit(1);
  for (char* p : owned) delete[] p;
  delete[] start, delete[] length, delete[] q_pos, delete[] tail_pos, delete[] at;
  delete[] (char*)votes, delete[] (char*)sinks;
}

static void linear(int64_t type, int64_t weight_type, int64_t rows, int64_t in, int64_t out) {
  char *x = block(rows * in, type, 3), *w = block(out * in, weight_type, 5), *b = block(out, weight_type, 7);
  char *y = block(rows * out, type, 1), *z = block(rows, type, 1);  // a second layer of one output
  const int64_t args[24] = {(int64_t)x, (int64_t)w, (int64_t)b, (int64_t)y, rows, in, out, in,
                            type,       weight_type, weight_type, 2,
                            (int64_t)x, (int64_t)w, 0,          (int64_t)z, rows, in, 1,   in,
                            type,       weight_type, 0,          2};
  if (kvpass_linears(args, 2)) std::exit(1);
  for (char* p : {x, w, b, y, z}) delete[] p;
}

int main() {
  for (int64_t model = 0; model < 3; model++)
    for (int64_t storage = 0; storage < 3; storage++) {
      for (int64_t tokens : {1, 5, 50})
        for (int64_t dim : {64, 72, 13}) attend(model, storage, dim, dim + 8, tokens, 8);
      attend(model, storage, 64, 64, 2, 0);
      for (int64_t rows : {1, 3, 8}) {
        linear(model, storage, rows, 72, 501);
        linear(model, storage, rows, 5, 3);
      }
    }
  std::puts("clean");
}
"""


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("target", [["-march=native"], ["-march=x86-64-v3"], []])
def test_sanitizers(tmp_path, target):
    """No read or write outside any tensor and no undefined behaviour, on every instruction set."""
    if target and target[0].endswith("v3") and "avx2" not in build._processor():
        pytest.skip("no AVX2")
    main = tmp_path / "main.cpp"
    main.write_text(SANITIZE_MAIN)
    here = Path(build.__file__).parent
    flags = [
        "-O1",
        "-g",
        "-std=c++17",
        "-fopenmp",
        "-w",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ]
    sources = [str(main), str(here / "linear.cpp")]
    command = ["g++", *flags, *target, f"-I{here}", *sources, "-o", str(tmp_path / "main")]
    subprocess.run(command, check=True)
    result = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stdout == "clean\n", result.stderr[-3000:]
