"""Who may hold a name, and what is compared, without files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distributor.errors import ConfigurationError
from distributor.values import lease_record
from distributor.values.checkpoints import Checkpoints, from_environ, to_environ
from distributor.values.checks import check_title
from distributor.values.lease_record import FencingToken, Holder, Identity, LeaseRecord
from distributor.values.sealed import seal

HERE = Holder("b1", "host-b", "machine", 7, "100")
OLD = LeaseRecord(4, 2, "train", "code", {"lr": "1"}, False, "a0", Holder("a0", "host-a", "other", 6, "50"))
SAME = Identity("gpt", "auto", "train", "code", {"lr": "1"}, {"lr": "0.1"})


def read(files: tuple[bytes | None, bytes | None]) -> LeaseRecord | None:
    return lease_record.find(dict(zip(lease_record.FILES, files)).get)


def test_a_new_name_begins_its_first_training() -> None:
    taken = lease_record.following(None, SAME, HERE)
    assert (taken.sequence, taken.training, taken.run, taken.holder, taken.finished) == (1, 1, "b1", HERE, False)
    never = lease_record.following(None, replace(SAME, resume="never"), HERE)
    assert never.training == 1


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_an_unfinished_training_goes_on(resume: lease_record.Resume) -> None:
    taken = lease_record.following(OLD, replace(SAME, resume=resume, arguments={"lr": "2"}), HERE)
    assert (taken.sequence, taken.training, taken.arguments) == (5, 2, {"lr": "2"})


@pytest.mark.parametrize("changed", [{"arguments": {"lr": "2"}}, {"arguments": {}}, {"code": "newer"}])
def test_a_finished_training_goes_on_with_other_arguments_or_code(changed: dict[str, Any]) -> None:
    taken = lease_record.following(replace(OLD, finished=True), replace(SAME, **changed), HERE)
    assert (taken.training, taken.finished) == (OLD.training, False)


def test_starting_over_takes_a_folder_of_its_own() -> None:
    for old in (OLD, replace(OLD, finished=True), replace(OLD, target="other")):
        assert lease_record.following(old, replace(SAME, resume="never"), HERE).training == 3


@pytest.mark.parametrize(
    ("found", "identity", "told"),
    [
        (None, replace(SAME, resume="must"), "resume='must', but there is no run named 'gpt' to go on with"),
        (replace(OLD, finished=True), SAME, r"'gpt' has finished \(run a0\) .* pass resume='never' .* other arguments"),
        (OLD, replace(SAME, target="other"), "the run named 'gpt' trains with 'train', and not with 'other': pass"),
        (
            replace(OLD, finished=True),
            replace(SAME, target="other", arguments={}),
            "the run named 'gpt' trains with 'train', and not with 'other': pass",
        ),
    ],
)
def test_a_training_that_does_not_fit_the_last_run_is_refused(
    found: LeaseRecord | None, identity: Identity, told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        lease_record.following(found, identity, HERE)


def test_the_newest_whole_record_counts() -> None:
    newer = OLD.renewed()
    assert read((seal(OLD), seal(newer))) == newer
    for length in range(len(seal(newer))):
        torn = seal(newer)[:length]
        assert read((seal(OLD), torn)) in (OLD, newer)
        assert read((torn, None)) in (None, newer)
    assert read((None, None)) is None
    assert read((seal(FencingToken("place", "a0")), b"nonsense")) is None


def test_a_released_name_has_no_holder() -> None:
    assert OLD.released(finished=True) == replace(OLD, sequence=5, finished=True, holder=None)
    assert read((seal(OLD), seal(OLD.released(finished=False)))) == replace(OLD, sequence=5, holder=None)


def test_names_stay_below_the_place() -> None:
    assert lease_record.folder_of("/shared/", "a/b") == "/shared/a%2Fb"
    assert lease_record.folder_of("/shared", "..") == "/shared/%2E."


def test_each_name_that_is_accepted_fits_into_a_file_name() -> None:
    names = ["训" * 100, "训" * 99 + "练", "/" * 100, "🦜" * 100, "x" * 100]
    found = [lease_record.folder_of("/shared", check_title("name", name)).removeprefix("/shared/") for name in names]
    assert len({*found}) == len(names)
    assert max(map(len, found)) == 255
    assert found[0].startswith("%E8%AE%AD" * 20)
    assert found[-1] == names[-1]


def test_ranks_get_the_fencing_token() -> None:
    fence = FencingToken("s3://bucket/gpt", "a0")
    assert from_environ(to_environ(Checkpoints("runs"), "/tmp/node", {}, None, fence)).fence == fence
    assert from_environ({}).fence is None
