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
    "conversation": ["please tell: the order number", "R-1", "paid on 27 November", "changed:", "enter the code"],
}
"""What each notebook shows when it is run."""


def outputs(notebook: Any) -> str:
    """Give everything that the notebook shows, as text."""
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(str(output.get("text", "")) + str(output.get("data", "")) for output in shown)


def notebook_of(name: str) -> Any:
    """Read a notebook as it is in the repository."""
    read: Any = nbformat.read
    return read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # nbclient's and jupyter_client's own
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the kernel's sockets, closed by the kernel's end
@pytest.mark.parametrize("name", SHOWN)
def test_notebook_runs_from_top_to_bottom(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell runs without a key: extracts and the recorded answer, and a conversation with tools."""
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = notebook_of(name)
    notebook.metadata.kernelspec.name = "python3"
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{Path('/usr/bin')}:/bin")
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = outputs(notebook)
    assert [text for text in SHOWN[name] if text not in shown] == []


@pytest.mark.parametrize("name", SHOWN)
def test_notebook_is_saved_with_its_outputs(name: str) -> None:
    """The notebook in the repository shows its outputs, and no error, to who only reads it."""
    notebook = notebook_of(name)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert SHOWN[name][-1] in outputs(notebook)
    assert "Traceback" not in outputs(notebook)
