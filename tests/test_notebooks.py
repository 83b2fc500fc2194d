"""The notebooks run, each in a kernel of its own, and are kept without outputs."""

from __future__ import annotations

import ast
from pathlib import Path

import nbclient
import nbformat
import pytest
from server_fixture import write_fix_b

from husky_mlx import sources
from husky_mlx.errors import SourceError

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What a test puts in place of the values in the cell tagged "parameters"; "tiny" is FIX-B.
CHEAP = {
    "01_quickstart": {"MAX_TOKENS": 8},
    "02_benchmark": {"PROMPT_TOKENS": 8, "GENERATION_TOKENS": 4, "ROUNDS": 1},
    "03_quantization": {"MODEL": "tiny", "RECIPES": ["4bit-uniform", "3bit-uniform"]},
    "04_kernel_lab": {},
}
# Words that the outputs hold in the end, pieces of them in order.
SHOWN = {
    "01_quickstart": ["native program", "Paris", "'reference': 0", "fits: "],
    "02_benchmark": ["image/png", "decode_tps", "MB a token", "PREDICTED"],
    "03_quantization": ["unquantized", "KL 0.0000", "3bit-uniform", "image/png", "%"],
    "04_kernel_lab": ["rounding alone: ", "race: ", "no barrier orders them", "m4max GemvTile("],
}


def read(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def set_parameters(notebook: nbformat.NotebookNode, values: dict) -> None:
    """Put ``values`` behind the cell tagged "parameters", which assigns each of these names."""
    if not values:
        return
    (index,) = (
        index
        for index, cell in enumerate(notebook.cells)
        if "parameters" in cell.metadata.get("tags", [])
    )
    assigned = {
        target.id
        for statement in ast.parse(notebook.cells[index].source).body
        for target in statement.targets
    }
    assert set(values) <= assigned, f"the parameters are {assigned}"
    lines = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    notebook.cells.insert(index + 1, nbformat.v4.new_code_cell(lines))


def shown(notebook: nbformat.NotebookNode) -> str:
    """All outputs as text; of a picture its type."""
    pieces = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            pieces += [output.get("text", ""), *output.get("data", {})]
    return "\n".join(pieces)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    values = dict(CHEAP[path.stem])
    if values.get("MODEL") == "tiny":
        values["MODEL"] = str(write_fix_b(tmp_path / "tiny"))
    else:
        try:
            sources.resolve("smollm2")
        except SourceError as error:
            pytest.skip(str(error))
    monkeypatch.delenv("HUSKY_NATIVE")
    # Kernels, histories and settings of whoever runs the tests stay out of it.
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook = read(path)
    set_parameters(notebook, values)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    text = shown(notebook)
    for piece in SHOWN[path.stem]:
        assert piece in text, f"{piece!r} is not in what {path.name} shows:\n{text}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stripped(path):
    for cell in read(path).cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, cell.source
            assert set(cell.metadata) <= {"tags"}, cell.source


def test_every_notebook_has_its_settings():
    assert {path.stem for path in NOTEBOOKS} == set(CHEAP) == set(SHOWN)
