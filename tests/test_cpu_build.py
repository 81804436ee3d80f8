"""The C++ kernels are compiled once and found again; whatever goes wrong ends in the reference kernels and one warning.

Each case runs in a process of its own, with a "compiler" that copies the library that the real one has made.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanoapc.kernels import cpu

ROOT = Path(__file__).parent.parent
PROGRAM = "from nanoapc.kernels.cpu import cpu_kernels; print(cpu_kernels().name.partition(' ')[0])"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working library, from the cache or compiled now."""
    cpu.CpuKernels()
    command = cpu.compile_command()
    cached = cpu.cache_folders()[0] / f"cpu-{cpu.build_key(command)}.so"
    if not cached.is_file():
        cached = tmp_path_factory.mktemp("library") / "library.so"
        cpu.build(command, cached)
    return cached


@pytest.fixture
def compiler(library: Path, tmp_path: Path) -> Path:
    """Takes the compiler's arguments, notes each use in compiler.log, delivers `library`."""
    script = tmp_path / "compiler"
    log = tmp_path / "compiler.log"
    log.touch()
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec echo 1.0\nfor last; do :; done\n'
        f'echo use >> "{log}"\nsleep 0.2\ncp "{library}" "$last"\n'
    )
    script.chmod(0o755)
    return script


def start(cache: Path, compiler: Path | str, program: str = PROGRAM, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NANOAPC_CACHE": str(cache), "CXX": str(compiler), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(cache: Path, compiler: Path | str, **environment: str) -> tuple[str, str]:
    """(name of the kernels that the process got, what it said on stderr)."""
    return finish(start(cache, compiler, **environment))


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip(), err.strip()


def uses(compiler: Path) -> int:
    return len(compiler.with_suffix(".log").read_text().splitlines())


def test_the_library_is_compiled_once_and_a_damaged_one_again(compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "a" / "cache"
    assert run(cache, compiler) == ("cpu", "")
    assert run(cache, compiler) == ("cpu", "")
    assert uses(compiler) == 1
    (built,) = cache.iterdir()
    built.write_bytes(built.read_bytes()[:5000])
    name, warning = run(cache, compiler)
    assert name == "cpu" and "damaged" in warning
    assert uses(compiler) == 2 and len(list(cache.iterdir())) == 1


def test_processes_that_compile_at_once_do_not_disturb_each_other(compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    processes = [start(cache, compiler) for _ in range(3)]
    assert [finish(process) for process in processes] == [("cpu", "")] * 3
    assert len(list(cache.iterdir())) == 1


def test_threads_that_need_the_library_at_once_get_one(compiler: Path, tmp_path: Path) -> None:
    program = (
        "from concurrent.futures import ThreadPoolExecutor as Pool; from nanoapc.kernels.cpu import cpu_kernels\n"
        "print({kernels.result().name for kernels in [Pool(4).submit(cpu_kernels) for _ in range(4)]})"
    )
    name, warning = finish(start(tmp_path / "cache", compiler, program))
    assert name.startswith("{'cpu") and "," not in name and not warning
    assert uses(compiler) == 1


def test_a_cache_that_cannot_be_written_costs_a_warning_only(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    name, warning = run(tmp_path / "file" / "cache", compiler)
    assert name == "cpu" and len(warning.splitlines()) == 1 and "NANOAPC_CACHE" in warning


def test_a_user_without_a_home_gets_the_kernels_too(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_entry(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "NANOAPC_CACHE", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    assert cpu.cache_folders() == []
    program = f"from nanoapc.kernels import cpu; cpu.cache_folders = list\n{PROGRAM}"
    name, warning = finish(start(tmp_path, compiler, program))
    assert name == "cpu" and "NANOAPC_CACHE" in warning


@pytest.mark.parametrize("kind", ["missing", "failing", "silent"])
def test_without_a_working_compiler_the_reference_runs_after_one_warning(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "compiler"
    script.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit 0\n" + ("echo no such header >&2; exit 1" * (kind == "failing"))
    )
    script.chmod(0o755)
    cache = tmp_path / "cache"
    if kind == "missing":
        name, warning = run(cache, "", PATH=str(tmp_path / "empty"))
    else:
        name, warning = run(cache, script)
    assert name == "reference"
    assert len(warning.splitlines()) == 1
    assert {"missing": "install g++", "failing": "no such header", "silent": "failed"}[kind] in warning
    assert not list(cache.glob("*"))


def test_the_key_covers_flags_compiler_and_sources(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {cpu.build_key([str(compiler)]), cpu.build_key([str(compiler), "-O0"])}
    compiler.write_text(compiler.read_text().replace("1.0", "2.0"))
    keys.add(cpu.build_key([str(compiler)]))
    changed = tmp_path / "cpu.cpp"
    changed.write_text("// changed")
    monkeypatch.setattr(cpu, "SOURCES", [changed, *cpu.SOURCES[1:]])
    keys.add(cpu.build_key([str(compiler)]))
    assert len(keys) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch's OpenMP is GNU's on Linux only")
@pytest.mark.parametrize(
    ("given", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")]
)
def test_threads_that_wait_leave_the_core_to_others(given: dict[str, str], expected: str) -> None:
    """OpenMP itself says what it has read, and that is what nanoapc sets, unless the caller has set it."""
    env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    env |= {"OMP_DISPLAY_ENV": "verbose", **given}
    command = [sys.executable, "-c", "import nanoapc"]
    shown = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stderr
    assert f"GOMP_SPINCOUNT = '{expected}'" in shown
