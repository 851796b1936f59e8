"""Tells secrets, such as passwords, from values that may be shown and kept. Pure functions."""

from __future__ import annotations

import itertools
import re

from distributor.text.wording import USER_IN_URL

#: A name with one of these words, or with a pair of them, is that of a secret.
_SECRET = {"token", "password", "passwd", "pwd", "passphrase", "secret", "secrets", "credential", "credentials"}
_SECRET |= {"apikey", "authorization"}
_SECRET_KEYS = {"api", "access", "private", "secret", "account", "encryption", "signing", "ssh"}  # before "key"

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")

_ASSIGNED = re.compile(r"[-+~]*([\w.@/-]+)=")  # as Hydra takes options: optim.lr=0.1


def is_secret(name: str, value: object) -> bool:
    """Return whether a value looks like a secret, by whole words of its name; a number never does.

    >>> is_secret("hfToken", "x"), is_secret("tokenizer", "x"), is_secret("token", 5), is_secret("api_key", "x")
    (True, False, False, True)
    >>> is_secret("argument 1", "+wandb.api_key=x")
    True
    """
    if not isinstance(value, str):
        return False
    assigned = _ASSIGNED.match(value)
    words = [word.lower() for word in _WORD.findall(name if assigned is None else f"{name} {assigned[1]}")]
    pairs = itertools.pairwise(words)
    return (
        not _SECRET.isdisjoint(words)
        or any(first in _SECRET_KEYS and second in ("key", "keys") for first, second in pairs)
        or USER_IN_URL.search(value) is not None
    )
