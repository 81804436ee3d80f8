"""Files that are written later are where they were named, and replace nothing but files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from llm_helpers import run
from tiny_models import random_ids

from nanoapc import LLM

MakeLLM = Callable[..., LLM]
NAMES = ["metrics_file", "prefix_cache_file"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_means_the_same_after_a_change_of_folder(
    name: str, make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("made", "later"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "made")
    with make_llm(**{name: "file"}) as llm:
        monkeypatch.chdir(tmp_path / "later")
        run(llm, [random_ids(9)])
    assert (tmp_path / "made" / "file").stat().st_size > 0 and not list((tmp_path / "later").iterdir())


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_links_are_followed(name: str, is_there: bool, make_llm: MakeLLM, tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    for _ in range(1 + is_there):
        with make_llm(**{name: link}) as llm:
            run(llm, [random_ids(9)])
    assert link.is_symlink() and target.stat().st_size > 0


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_refused(name: str, make_llm: MakeLLM, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", tmp_path / "folder", "/dev/null"):
        with pytest.raises(ValueError, match=f"{name}=.*is no regular file; name another"):
            make_llm(**{name: path})


def test_two_llms_do_not_write_one_trace(make_llm: MakeLLM, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("something older")
    with make_llm(trace=trace) as llm:
        run(llm, [random_ids(9)])
        with pytest.raises(ValueError, match="another LLM is writing it"):
            make_llm(trace=trace)
    assert trace.read_text().startswith('{"format":"nanoapc trace"')


@pytest.mark.parametrize("names", [("metrics_file", "prefix_cache_file"), ("trace", "metrics_file")])
def test_no_two_arguments_have_one_file(names: tuple[str, str], make_llm: MakeLLM, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(ValueError, match=r"are the same file .*; give each its own"):
        make_llm(**{names[0]: tmp_path / "file", names[1]: tmp_path / "link"})
    assert not (tmp_path / "file").exists()
