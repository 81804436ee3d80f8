"""The documentation is true: its code runs, and every file, function and option that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import nanoapc
from nanoapc import LLM, EngineConfig

REPOSITORY = Path(__file__).parent.parent
DOCUMENTS = sorted([*(REPOSITORY / "docs").glob("*.md"), REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"])
EMBEDDED = Path(nanoapc.__file__).parent / "embedded"
READERS = {"document": "The king has called his lords to York.", "questions": ["Who has called?", "Where to?"]}
"""Names that a document leaves to its reader."""

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


class SmallLLM(LLM):
    """Runs the embedded model where a document names one of the hub's."""

    def __init__(self, model: Any, **arguments: Any):
        super().__init__(model if Path(model).is_dir() else EMBEDDED, **arguments)


def python_blocks(text: str) -> list[tuple[int, str]]:
    """(line, code) of the blocks marked as python."""
    blocks = re.finditer(r"^( *)```python\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [(text[: block.start()].count("\n") + 1, block.group(2)) for block in blocks]


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if python_blocks(d.read_text())], ids=lambda path: path.name)
def test_the_code_runs(document: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nanoapc, "LLM", SmallLLM)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = dict(READERS)
    for line, code in python_blocks(document.read_text()):
        exec(compile("\n" * line + code, str(document), "exec"), names)  # with the document's line numbers


def test_these_documents_have_code() -> None:
    for name in ("prefix_caching.md", "a_prompts_way.md"):
        assert len(python_blocks((REPOSITORY / "docs" / name).read_text())) >= 5


def definitions(file: Path) -> set[str]:
    """Names that a Python file defines at its top level, and "Class.method"s."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@each_document
def test_links_lead_to_files(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@each_document
def test_linked_functions_stand_where_the_link_says(document: Path) -> None:
    for name, target in re.findall(r"\[`([\w.]+)`\]\(([^)#\s]+\.py)\)", document.read_text()):
        if not name.endswith(".py") and "/" not in name:
            assert name in definitions(document.parent / target), f"{document.name}: {name} is not in {target}"


@each_document
def test_files_that_are_named_exist(document: Path) -> None:
    folders = ("", "nanoapc/**/", "tests/", "tools/", "examples/", "docs/")
    known = {str(path.relative_to(REPOSITORY)) for folder in folders for path in REPOSITORY.glob(f"{folder}*.*")}
    for name in re.findall(r"`([\w./-]+\.(?:py|cpp|md|html|toml|txt))`", document.read_text()):
        assert any(path == name or path.endswith("/" + name) for path in known), f"{document.name} names {name}"


def test_the_parts_in_the_architecture_are_the_files_of_the_package() -> None:
    """Every module is in the picture, and everything in the picture is there."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text().split("```")[1]
    package = REPOSITORY / "nanoapc"
    for part in ("", "engine"):
        for file in (package / part).glob("*.py"):
            if not file.name.startswith("__"):
                assert file.name in text, f"docs/architecture.md does not mention {file.relative_to(REPOSITORY)}"
    for name in re.findall(r"\b([\w]+\.py)\b", text):
        assert list(package.rglob(name)), f"docs/architecture.md mentions {name}"


@each_document
def test_engine_arguments_that_are_named_exist(document: Path) -> None:
    for call in re.findall(r"LLM\(([^()]*)\)", document.read_text()):
        for name in re.findall(r"(\w+)=", call):
            assert name in EngineConfig.__dataclass_fields__, f"{document.name}: LLM has no argument {name}"


def test_every_prompt_way_statement_has_a_function() -> None:
    text = (REPOSITORY / "docs" / "a_prompts_way.md").read_text()
    assert len(re.findall(r"\[`[\w.]+`\]\([^)]+\.py\)", text)) >= 30
