"""Return values and output in pieces."""

from distributor.schedulers.hosting import report
from distributor.values.messages import Rest


def test_pieces_and_rest_of_files(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"0123456789")
    assert list(report.pieces(str(path), 4, 1)) == [b"1234", b"5678", b"9"]
    files = [Rest(3, 2, str(path), 6)]
    assert list(report.rest(files, 3)) == [(3, 2, 6, b"678"), (3, 2, 9, b"9")]
