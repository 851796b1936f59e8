"""The notebooks run from top to bottom, in a kernel of this Python, and are committed without what they print.

``NOTEBOOKS_OUT=FOLDER`` keeps them as they were executed, to be looked at.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

#: What makes torchvision's builds for CUDA usable beside torch for CPUs.
KERNEL = Path(__file__).parent / "support" / "kernel"

#: Seconds that a cell may take.
LIMIT = 180

#: What notebooks need besides what all need, by a word of their names.
NEEDED = {
    "deepspeed": ["deepspeed"],
    "trl": ["trl", "datasets", "deepspeed"],
    "lightning": ["pytorch_lightning"],
    "accelerate": ["accelerate"],
    "retinanet": ["torchvision"],
    "composer": ["composer"],
    "foundry": ["llmfoundry"],
    "axolotl": ["axolotl"],
    "unsloth": ["unsloth"],
    "sweep": ["optuna"],
}

#: Notebooks whose code other tests of CI run, too.
LONG = (
    *("03_deepspeed_zero", "04_fsdp_transformer", "05_trl_fine_tuning"),
    *("02_ddp_on_a_cluster", "06_lightning_recommender", "07_accelerate", "14_dataframes", "15_predict"),
    *("13_survive", "16_track_and_sweep"),
)

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_there_are_notebooks() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{number:02}" for number in range(1, 17)]
    page = (FOLDER / "README.md").read_text()
    assert re.findall(r"\]\((\w+)\.ipynb\)", page) == [path.stem for path in NOTEBOOKS]


@every_notebook
def test_notebooks_are_committed_without_outputs(path: Path) -> None:
    for cell in code_cells(json.loads(path.read_text())):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


def choice(path: Path) -> str:
    """The lines by which a notebook chooses between GPUs and CPUs."""
    sources = ["".join(cell["source"]) for cell in code_cells(json.loads(path.read_text()))]
    (lines,) = re.findall(r"^spark = SparkSession\.getActiveSession\(\)\n(?:.+\n)+", "\n\n".join(sources), re.MULTILINE)
    return str(lines)


@pytest.mark.parametrize(
    ("settings", "here", "gpus"),
    [
        pytest.param(None, 0, False, id="no-session"),
        pytest.param(None, 8, True, id="no-session-and-gpus-here"),
        pytest.param({"spark.master": "local[2]"}, 8, True, id="no-executors"),
        pytest.param({"spark.master": "local-cluster[2,1,1024]"}, 8, False, id="executors-without-gpus"),
        pytest.param({"spark.master": "yarn", "spark.task.resource.gpu.amount": "1"}, 0, True, id="gpus-of-executors"),
        pytest.param({"spark.task.resource.gpu.amount": "1"}, 0, True, id="connect"),
    ],
)
def test_notebooks_that_start_no_spark_use_the_gpus_of_where_they_train(
    settings: dict[str, str] | None, here: int, gpus: bool
) -> None:
    session = None if settings is None else SimpleNamespace(conf=SimpleNamespace(get=settings.get))
    for path in NOTEBOOKS[3:]:
        if "SparkSession.builder" in path.read_text():
            continue
        names: dict[str, Any] = {
            "SparkSession": SimpleNamespace(getActiveSession=lambda: session),
            "torch": SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: here)),
            "RANKS": 2,
        }
        exec(choice(path), names)
        assert names["use_gpu"] is gpus, path.stem


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize(
    "path", [pytest.param(one, id=one.stem, marks=[pytest.mark.long] if one.stem in LONG else []) for one in NOTEBOOKS]
)
def test_notebooks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["ipykernel", "matplotlib", "nbclient", "pyspark", "sklearn"]
    needed += [name for word, names in NEEDED.items() if word in path.stem for name in names]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing or shutil.which("java") is None:
        pytest.skip(f"not here: {', '.join(missing) or 'Java'}")
    import nbformat
    from ipykernel.kernelspec import write_kernel_spec
    from nbclient import NotebookClient

    write_kernel_spec(tmp_path / "kernels" / "python3")  # this interpreter, whatever "python3" is to the user
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(KERNEL), prepend=os.pathsep)
    work = tmp_path / "work"
    work.mkdir()
    notebook = nbformat.read(shutil.copy(path, work), as_version=4)
    client = NotebookClient(notebook, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": str(work)}})
    try:
        client.execute()  # raises what a cell raises
    finally:
        if "NOTEBOOKS_OUT" in os.environ:
            out = Path(os.environ["NOTEBOOKS_OUT"])
            out.mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook, out / path.name)

    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert any("image/png" in output.get("data", {}) for output in outputs)
    # Neither Python's warnings nor Spark's are a sight for readers.
    errors = "".join(output["text"] for output in outputs if output.get("name") == "stderr")
    assert not re.search("warn", errors, re.IGNORECASE), errors
