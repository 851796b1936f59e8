"""Which settings of a session rule out a run, or are worth a warning."""

from __future__ import annotations

import pytest
from jobs import make_job

from distributor.errors import ConfigurationError
from distributor.launch.torchrun import Torchrun
from distributor.schedulers.spark import checks
from distributor.values.job import Function

JOB = make_job("r1", 2, Function("train", b"pickled"), False, launch=Torchrun())


class Settings:
    """A classic session that has settings only."""

    def __init__(self, master: str, **settings: str) -> None:
        self.conf = self.sparkContext = self
        self._conf = {name.replace("_", "."): value for name, value in settings.items()}
        self.master = master

    def get(self, key: str, default: str | None = None) -> str | None:
        return self._conf.get(key, default)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"spark_ssl_enabled": " True "}, "spark.ssl.enabled is true"),
        ({"spark_network_crypto_enabled": "true"}, "spark.network.crypto.enabled is true"),
        (
            {"spark_authenticate": "true", "spark_authenticate_enableSaslEncryption": "true"},
            "spark.authenticate.enableSaslEncryption is true",
        ),
    ],
)
def test_encryption_is_refused_unless_it_is_forgone(
    settings: dict[str, str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{words}, .* set pytorch\.spark\.distributor\.ignoreSsl to true"):
        checks.check_encryption(Settings("local[2]", **settings), JOB)
    assert caplog.text == ""
    checks.check_encryption(Settings("local[2]", **settings, pytorch_spark_distributor_ignoreSsl="true"), JOB)
    assert f"{words}, but" in caplog.text
    assert "accepted by pytorch.spark.distributor.ignoreSsl" in caplog.text


def test_authentication_alone_is_a_warning_once_a_session(caplog: pytest.LogCaptureFixture) -> None:
    """It is not encryption, and Spark promises none."""
    checks.check_encryption(Settings("local[2]", spark_authenticate="false"), JOB)
    assert caplog.text == ""
    session = Settings("local[2]", spark_authenticate=" True ")
    for _ in range(2):
        checks.check_encryption(session, JOB)
    (warning,) = caplog.messages
    assert warning.startswith("spark.authenticate is true, but")
    assert "NOT authenticated: NCCL's and gloo's" in warning
    assert checks.encryption(session) == []
    checks.check_encryption(Settings("local[2]", spark_authenticate="true"), JOB)
    assert len(caplog.messages) == 2


def test_barrier_mode_rules_out_dynamic_allocation() -> None:
    dynamic = {"spark_dynamicAllocation_enabled": "true"}
    with pytest.raises(ConfigurationError, match="SPARK-24942"):
        checks.check_barrier_mode(Settings("spark://a:7077", **dynamic))
    checks.check_barrier_mode(Settings("local[2]", **dynamic))
    checks.check_barrier_mode(Settings("spark://a:7077"))
