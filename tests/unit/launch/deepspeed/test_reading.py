"""DeepSpeed's configuration from dicts, JSON and YAML."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distributor import ConfigurationError, DeepspeedTorchDistributor
from distributor.launch.deepspeed import reading
from distributor.launch.deepspeed.config import AUTO, TRAIN


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.json", '{"bf16": ', "is malformed: Expecting value: line 1 column 10"),
        ("b.json", "[1]", "must contain a mapping, not list [1]"),
        ("c.json", "stage: 3", "is malformed: Expecting value: line 1 column 1"),
        ("d.json", '{"bf16": {}, "bf16": {}}', "gives 'bf16' twice"),
        ("e.yaml", "bf16: {enabled: [", "is malformed: while parsing"),
        ("f.yaml", "bf16: {}\nbf16: {}", "gives 'bf16' twice"),
        ("j.yaml", "a: &a {lr: 1.0}\nb: {c: &c {<<: *a, lr: 2.0, lr: 3.0}}\nd: {<<: *c}", "gives 'lr' twice"),
        ("g.yml", "- 1", "must contain a mapping, not list [1]"),
        ("h.json", None, "cannot be read on the driver: No such file or directory"),
        ("i.json", b"\xff\xfe", "cannot be read on the driver: 'utf-8' codec"),
    ],
)
def test_files_that_are_refused(name: str, content: str | bytes | None, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigurationError) as caught:
        DeepspeedTorchDistributor(2, 1, True, False, path)
    assert text in str(caught.value)


def test_yaml_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "ds.yaml").write_text("bf16: {}")
    with pytest.raises(ConfigurationError, match="needs PyYAML on the driver .*: pip install pyyaml, or use JSON"):
        reading.read(tmp_path / "ds.yaml")


def test_json_with_comments_is_read_as_deepspeed_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n  // why\n  "train_batch_size": 8, # that many\n}')
    assert reading.read(path) == {TRAIN: 8}
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ConfigurationError, match="is malformed: Expecting property name"):
        reading.read(path)


def test_yaml_is_what_json_would_be(tmp_path: Path) -> None:
    """YAML 1.1 itself takes 5e-5 for a string."""
    path = tmp_path / "ds.yaml"
    path.write_text(
        "base: &base {lr: 5e-5, eps: 1.0e-8, betas: [0.9, 1E+0]}\n"
        "optimizer: {type: Adam, params: {<<: *base, torch_adam: true}}\n"
        "zero_optimization: {stage: 2, reduce_bucket_size: auto}\n"
    )
    config = reading.read(path)
    assert config["optimizer"]["params"] == {"lr": 5e-5, "eps": 1e-8, "betas": [0.9, 1.0], "torch_adam": True}
    assert config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": AUTO}


def test_a_yaml_mapping_that_merges_another_may_be_merged(tmp_path: Path) -> None:
    """YAML's library builds what is nested last, and writes what a mapping merges into the mapping itself."""
    path = tmp_path / "ds.yaml"
    path.write_text("base: &b {lr: 1.0}\noptimizer: {params: &x {<<: *b, lr: 2.0}}\nother: {<<: *x}\n")
    config = reading.read(path)
    assert config == {"base": {"lr": 1.0}, "optimizer": {"params": {"lr": 2.0}}, "other": {"lr": 2.0}}


def test_reading_a_dict_copies_it() -> None:
    mine = {"optimizer": {"type": "Adam", "params": {"betas": (0.9, 0.99)}}}
    config = reading.read(mine)
    config["optimizer"]["params"]["betas"].append(1)
    assert mine == {"optimizer": {"type": "Adam", "params": {"betas": (0.9, 0.99)}}}
