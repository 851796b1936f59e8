"""What a script or notebook defines can be pickled by reference in a rank, and in processes that the rank starts."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import json
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from sessions import Make

from distributor import TorchDistributor, TrainingError

PROGRAM = """
    import dataclasses
    import json
    import multiprocessing
    import sys
    from concurrent.futures import ProcessPoolExecutor

    import torch
    from distributor import TorchDistributor


    class Net(torch.nn.Linear):
        pass


    @dataclasses.dataclass
    class Config:
        width: int


    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return square(index)


    def square(value):
        return value * value


    def train(path, config):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        torch.save({"net": Net(config.width, 1), "config": config}, f"{path}/{dist.get_rank()}.pt")
        configs = [None] * dist.get_world_size()
        dist.all_gather_object(configs, config)
        results = [[each.width for each in configs]]
        for method in ("fork", "spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                results.append(list(pool.map(square, [2, 3])))
        loader = torch.utils.data.DataLoader(Squares(), num_workers=1, multiprocessing_context="spawn")
        return [*results, [int(each) for each in loader]]


    def load(path):
        saved = torch.load(path, weights_only=False)
        return isinstance(saved["net"], Net) and saved["config"] == Config(5)


    if __name__ == "__main__":
        folder, master = sys.argv[1:]
        if master != "local":
            from pyspark.sql import SparkSession

            SparkSession.builder.master(master).config("spark.ui.enabled", "false").getOrCreate()
        distributor = TorchDistributor(2, local_mode=master == "local", use_gpu=False, progress=False)
        results = distributor.run(train, folder, Config(5))
        print(json.dumps([results, load(f"{folder}/1.pt"), distributor.run(load, f"{folder}/0.pt")]))
"""


@pytest.mark.parametrize(
    "master", ["local", pytest.param("local-cluster[2,1,1024]", marks=[pytest.mark.spark, pytest.mark.long])]
)
@pytest.mark.long
def test_what_a_script_defines_is_found_by_its_name(master: str, tmp_path: Path) -> None:
    done = programs.run(tmp_path, PROGRAM, tmp_path, master)
    assert json.loads(done.stdout.splitlines()[-1]) == [[[5, 5], [4, 9], [4, 9], [4, 9], [0, 1, 4]], True, True]


SCRIPT = """
import atexit, gzip, io, multiprocessing, os, sys, tarfile, zipfile
import torch

class Answer(torch.nn.Linear):
    pass

def answer(number):
    return Answer(number, 1)

lines = gzip.open("lines.gz", "wt")
lines.write("one")
archive = zipfile.ZipFile("archive.zip", "w")
archive.writestr("a", "b")
packed = tarfile.open("packed.tgz", "w:gz")
packed.addfile(tarfile.TarInfo("empty"))

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        (made,) = pool.map(answer, [3])
    atexit.register(lambda: torch.save(made, "answer.pt"))
"""


@pytest.mark.parametrize("kind", ["script", pytest.param("module", marks=pytest.mark.long)])
@pytest.mark.slow
def test_a_script_goes_on_as_main_until_its_rank_ends(
    make_local: Make, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children send back objects of its classes, exit callbacks pickle them, and open files are completed."""
    monkeypatch.chdir(tmp_path)
    Path("as_main.py").write_text(SCRIPT)
    if kind == "script":
        make_local(1).run("as_main.py")
    else:
        monkeypatch.syspath_prepend(str(tmp_path))
        make_local(1).run_module("as_main")
    with pytest.raises(AttributeError, match="Answer"):  # saved by its name in the script's __main__
        torch.load("answer.pt", weights_only=False)
    assert gzip.open("lines.gz").read() == b"one"
    assert zipfile.ZipFile("archive.zip").namelist() == ["a"]
    assert tarfile.open("packed.tgz").getnames() == ["empty"]


OWN = """
    import multiprocessing
    import sys
    from concurrent.futures import ProcessPoolExecutor

    import torch
    from own import helpers

    WIDTH = 3
    COUNT = 0


    class Net(torch.nn.Linear):
        def forward(self, batch):
            return helpers.double(super().forward(batch))


    def square(value):
        return value * value


    def count():
        global COUNT
        COUNT += 1
        return COUNT


    def train(path):
        torch.compile(Net(WIDTH, 1), backend="eager", fullgraph=True)(torch.ones(2, WIDTH))  # looks helpers up by name
        torch.save(Net(WIDTH, 1), path)
        results = [type(torch.load(path, weights_only=False)) is Net]
        for method in ("fork", "spawn"):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
                results.append(list(pool.map(square, [2, 3])))
        import own.nets

        own.nets.COUNT = 4
        return [*results, count(), own.nets.COUNT, own.nets.Net is Net, Net(1, 1)]


    def train_elsewhere():
        from own.nets import forgotten


    def train_with_module():
        import own.nets

        return own.nets.forgotten


    def train_on_shared_storage(folder):
        sys.path.insert(0, folder)
        from own.nets import forgotten

        return forgotten()


    def forgotten():
        return "found"
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of the user, in a package, which is not ``__main__``."""
    package = tmp_path / "project" / "own"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "helpers.py").write_text("FACTOR = 2\ndef double(batch):\n    return batch * FACTOR\n")
    (package / "nets.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(str(package.parent))
    yield importlib.import_module("own.nets")
    for name in ("own.nets", "own.helpers", "own"):
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.ci
def test_what_an_own_module_defines_is_found_by_its_name(make: Make, own: Any, tmp_path: Path) -> None:
    *results, net = make(1).run(own.train, str(tmp_path / "net.pt"))
    assert results == [True, [4, 9], [4, 9], 5, 5, True]
    assert type(net) is type(torch.load(tmp_path / "net.pt", weights_only=False)) is own.Net


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.usefixtures("two_executors")
def test_what_has_not_travelled_of_a_module_is_said_with_the_folder_to_pass(own: Any, tmp_path: Path) -> None:
    distributor, folder = TorchDistributor(1, local_mode=False, use_gpu=False), str(tmp_path / "project")
    for train in (own.train_elsewhere, own.train_with_module):
        with pytest.raises(TrainingError) as raised:
            distributor.run(train)
        assert "own.nets is on the driver" in str(raised.value)
        assert f"working_dir={folder!r}" in str(raised.value)
    assert distributor.run(own.train_on_shared_storage, folder) == "found"


def test_a_value_comes_back_whose_module_only_a_name_has(make_local: Make, tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text("class Result: ...\ndef train():\n    return Result()\n")
    spec = importlib.util.spec_from_file_location("plugin", tmp_path / "plugin.py")
    assert spec is not None and spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    assert type(make_local(1).run(plugin.train)) is plugin.Result
