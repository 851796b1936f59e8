"""What is a secret, by its name or as a URL."""

from __future__ import annotations

import pytest

from distributor.text.secret import is_secret


@pytest.mark.parametrize(
    "name", ["token", "hf_token", "hfToken", "HF-TOKEN", "db.password", "API_KEY", "aws_secret", "accessKey", "pwd"]
)
def test_secrets_are_known_by_whole_words(name: str) -> None:
    assert is_secret(name, "x")
    assert not is_secret(name, 5)


@pytest.mark.parametrize("name", ["tokenizer", "max_tokens", "key", "sort_key", "secretary", "monkey", "passes"])
def test_other_words_are_no_secrets(name: str) -> None:
    assert not is_secret(name, "x")


def test_a_url_with_a_user_is_a_secret() -> None:
    assert is_secret("store", "postgresql://me:pw@host/db")
    assert not is_secret("store", "postgresql://host/db@2")
