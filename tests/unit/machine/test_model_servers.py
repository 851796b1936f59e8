"""Which models are on the GPUs of a run."""

import os

import pytest

from distributor.machine import model_servers


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(model_servers.tempfile, "tempdir", str(tmp_path))

    def folder(owner, name, *gpus, mode=0o700):
        path = f"{model_servers.folder_prefix(owner)}{name}"
        os.mkdir(path, mode)
        if gpus:
            with open(os.path.join(path, model_servers.GPUS), "w") as file:
                file.write("\n".join(gpus))
        return path

    return folder


def test_models_are_found_by_their_gpus_and_their_executor(make):
    one, two, of_another = make(7, "a", "0"), make(7, "b", "1", "2"), make(77, "c", "0")
    make(7, "on-cpus")
    make(7, "of-others", "0", mode=0o755)
    assert model_servers.on_gpus(["0"], 7) == [one]
    assert model_servers.on_gpus(["2", "3"], 7) == [two]
    assert sorted(model_servers.on_gpus(["0", "1"], None)) == [one, two, of_another]
    assert model_servers.on_gpus(["00"], None) == []


def test_what_has_no_server_is_not_waited_for(make):
    gone = make(7, "gone", "0")
    started = make(7, "killed", "0")
    open(os.path.join(started, model_servers.LOCK), "w").close()
    assert model_servers.vacate([gone, started], patience=60.0) == 0
    assert not model_servers.release(gone)
