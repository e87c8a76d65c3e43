from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
SHOWN = {
    "quickstart": ["44 documents", "RECORDED", "121.6 g"],
    "effort": ["facts of 6", "What the number of the configuration of Atlas V says", "121.6 g"],
    "evaluation": ["44 documents, 16 questions", "medium", "bridge-03 missed destinations/pluto.md"],
    "conversation": ["please tell: the order number", "R-1", "paid on 27 November", "changed:", "enter the code"],
    "llamaindex_app": ["5 nodes", "apollo-11.md", "CBEventType.SYNTHESIZE", "110.6 m tall"],
}
"""What each notebook shows when it is run; last the one that sets LlamaIndex's ``Settings``."""


def outputs(notebook: Any) -> str:
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(str(output.get("text", "")) + str(output.get("data", "")) for output in shown)


def notebook_of(name: str) -> Any:
    read: Any = nbformat.read
    return read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # nbclient's and jupyter_client's own
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the kernel's sockets, closed by the kernel's end
def test_notebooks_run_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell runs without a key, and the notebooks show what they promise.

    They share one kernel, whose names are forgotten in between: a kernel loads torch for seconds.
    """
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{Path('/usr/bin')}:/bin")
    notebooks = {name: notebook_of(name) for name in SHOWN}
    make: Any = nbformat.v4
    whole = make.new_notebook()
    for notebook in notebooks.values():
        whole.cells += [make.new_code_cell("%reset -sf"), *notebook.cells]
    NotebookClient(whole, timeout=300, kernel_name="python3").execute()
    missing = {name: [text for text in SHOWN[name] if text not in outputs(notebooks[name])] for name in SHOWN}
    assert missing == {name: [] for name in SHOWN}


@pytest.mark.parametrize("name", SHOWN)
def test_notebook_is_saved_with_its_outputs(name: str) -> None:
    """The notebook in the repository shows its outputs, and no error, to who only reads it."""
    notebook = notebook_of(name)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert [text for text in SHOWN[name] if text not in outputs(notebook)] == []
    assert "Traceback" not in outputs(notebook)
