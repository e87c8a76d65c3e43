from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "quickstart.ipynb"


def outputs(notebook: Any) -> str:
    """Give everything that the notebook shows, as text."""
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(str(output.get("text", "")) + str(output.get("data", "")) for output in shown)


def quickstart() -> Any:
    """Read the notebook as it is in the repository."""
    read: Any = nbformat.read
    return read(NOTEBOOK, as_version=4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # nbclient's and jupyter_client's own
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the kernel's sockets, closed by the kernel's end
def test_notebook_runs_from_top_to_bottom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell of the quickstart runs without a key, and shows extracts and the recorded answer."""
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = quickstart()
    notebook.metadata.kernelspec.name = "python3"
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{Path('/usr/bin')}:/bin")
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = outputs(notebook)
    assert "44 documents" in shown
    assert "RECORDED" in shown
    assert "121.6 g" in shown


def test_notebook_is_saved_with_its_outputs() -> None:
    """The notebook in the repository shows its outputs, and no error, to who only reads it."""
    notebook = quickstart()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert "121.6 g" in outputs(notebook)
    assert "Traceback" not in outputs(notebook)
