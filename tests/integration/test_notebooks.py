"""Every notebook of examples/notebooks runs to its end in short settings, its own assertions included."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forked_processes import forked_kernel

nbformat = pytest.importorskip("nbformat", reason="notebooks need rlinf[notebooks]")
nbclient = pytest.importorskip("nbclient", reason="notebooks need rlinf[notebooks]")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def execute(notebook, folder: Path, monkeypatch) -> None:
    """Run all cells in a kernel that forks, whose temporary folders are in ``folder``.

    Raises:
        CellExecutionError: A cell has failed.
    """
    monkeypatch.setattr("jupyter_client.provisioning.local_provisioner.launch_kernel", forked_kernel)
    monkeypatch.setenv("RLINF_NOTEBOOK_SHORT", "1")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    settings = {"timeout": 1200, "kernel_name": "python3", "resources": {"metadata": {"path": str(folder)}}}
    nbclient.NotebookClient(notebook, **settings).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end(path, tmp_path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    execute(notebook, tmp_path, monkeypatch)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "it draws something"
    # torch makes its compiler's cache in the temporary folder of the first process that imports the compiler.
    expected = ("rlinf_", "torchinductor_")
    assert not [path.name for path in tmp_path.iterdir() if not path.name.startswith(expected)], "written next to it"


@pytest.mark.parametrize("source", ["1 / 0", "assert 1 > 2, 'the claim'"])
def test_a_cell_that_fails_is_an_error(source, tmp_path, monkeypatch):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        execute(notebook, tmp_path, monkeypatch)
