"""Writes numbers, ranks, sizes and times as text for users, and reads sizes that users write. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}

USER_IN_URL = re.compile(r"(?<=://)[^/\s]+@")

_PASSWORD_IN_URL = re.compile(r"(://[^/\s@:]*):[^/\s]*(?=@)")

_SECRET_IN_QUERY = re.compile(r"([?&][\w.-]*(?:password|token|secret|key|sig|signature)=)[^&\s'\"]+", re.IGNORECASE)


def ranges(ranks: Iterable[int]) -> str:
    """Return ranks as a short list of ranges.

    >>> ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def who(ranks: Iterable[int]) -> str:
    """Return ranks as text, preceded by "rank" or "ranks".

    >>> who([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    ranks = list(ranks)
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {ranges(ranks)}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the singular or the plural.

    >>> count(1, "node"), count(2, "node"), count(2, "process")
    ('1 node', '2 nodes', '2 processes')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def size(number: float) -> str:
    """Return a number of bytes as text, in the largest suitable unit, with one decimal below 10.

    >>> size(0), size(1536), size(64 << 20), size(1 << 30)
    ('0 bytes', '1.5 KiB', '64 MiB', '1.0 GiB')
    """
    if number < 1024:
        return f"{number:.0f} byte{'s' * (round(number) != 1)}"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        number /= 1024
        if number < 1024 or unit == "TiB":
            break
    return f"{number:,.1f} {unit}" if number < 10 else f"{number:,.0f} {unit}"


def without_token(text: str) -> str:
    """Return a text without the token that the URL of a Spark Connect server may have.

    >>> without_token("sc://host:15002/;use_ssl=true;token=ab/c==;user_id=me")
    'sc://host:15002/;use_ssl=true;token=***;user_id=me'
    """
    return re.sub(r"(?i)\b(token=)[^;'\"\s]*", r"\1***", text)


def printable(text: str) -> str:
    """Return a text that can be encoded: the name of a file need not be UTF-8.

    >>> printable("a\\udcff")
    'a\\\\udcff'
    """
    return text.encode(errors="backslashreplace").decode()


def without_user(text: str) -> str:
    """Return a text without the users and passwords that its URLs may have.

    >>> without_user("no answer from postgresql://me:pw@db:5432/mlflow")
    'no answer from postgresql://db:5432/mlflow'
    >>> without_user("http://me:p@ss@host/x?access_token=pw")
    'http://host/x?access_token=***'
    """
    return _SECRET_IN_QUERY.sub(r"\1***", USER_IN_URL.sub("", text))


def without_password(text: str) -> str:
    """Return a text without the passwords of its URLs. Names stay: a container of Azure's stands where users do.

    >>> without_password("sftp://me:pw@host/kept or abfss://data@account/kept")
    'sftp://me@host/kept or abfss://data@account/kept'
    >>> without_password("https://account/kept?sv=1&sig=pw&x=1")
    'https://account/kept?sv=1&sig=***&x=1'
    """
    return _SECRET_IN_QUERY.sub(r"\1***", _PASSWORD_IN_URL.sub(r"\1", text))


def address(host: str, port: int | str) -> str:
    """Return a host and a port as text, with the brackets that IPv6 needs.

    >>> address("10.0.0.1", 4711), address("fd00::1", 4711)
    ('10.0.0.1:4711', '[fd00::1]:4711')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def shortened(text: str, most: int) -> str:
    """Return a text, without its middle if it has more than ``most`` characters.

    >>> shortened("0123456789", 4)
    '01\\n[6 characters are left out]\\n89'
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[{len(text) - 2 * half:,} characters are left out]\n{text[len(text) - half :]}"


def mebibytes(number: int) -> str:
    """Return a number of bytes in MiB, the unit of Spark's settings.

    >>> mebibytes(1 << 30)
    '1,024 MiB'
    """
    return f"{number >> 20:,} MiB"


def duration(seconds: float) -> str:
    """Return a duration as text.

    >>> duration(0.012), duration(3.25), duration(83), duration(7384)
    ('12 ms', '3.2 s', '1 min 23 s', '2 h 03 min')
    """
    if 0 < seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def parse_memory(text: str, unit: str = "") -> int:
    """Return the number of bytes of a size in Spark's notation; ``unit`` is that of a bare number. Raises ValueError.

    >>> parse_memory("8g"), parse_memory("512MB"), parse_memory("1.5k"), parse_memory("2", "m")
    (8589934592, 536870912, 1536, 2097152)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", text.lower())
    if match is None:
        raise ValueError(text)
    return int(float(match[1]) * (1 << _UNITS[match[2] or ("" if match[3] else unit)]))


def no_temporary_folder(host: str, why: str) -> str:
    """Return the text of the error for an executor's host whose temporary folder cannot be used."""
    return (
        f"the temporary folder on {host} cannot be used ({why}): make it usable there, or set another one for "
        "executors (spark.executorEnv.TMPDIR)"
    )


#: In the text of an error about a companion: the restart policy recognizes the error by it.
NOT_READY = "before it was ready"

#: What users must call so that their ranks train together, by framework.
_REMEDIES = {
    "pytorch_lightning": "Trainer() or Fabric() without devices=1, which requests a single device",
    "transformers": "TrainingArguments(use_cpu=True) on CPUs",
    "accelerate": "Accelerator(cpu=True) on CPUs",
    "torch": "torch.distributed.init_process_group() before the model is made",
}


def alone(framework: str, world_size: int) -> str:
    """Return why a rank has trained without the others, and what to do; ``framework`` may be ``"torch"``.

    >>> alone("accelerate", 2)[:88]
    'trained without the other ranks: there never was a process group of all 2 ranks, so each'
    """
    remedy = _REMEDIES.get("pytorch_lightning" if "lightning" in framework else framework, _REMEDIES["torch"])
    return (
        f"trained without the other ranks: there never was a process group of all {world_size} ranks, so each rank "
        f"trained its own model. Call {remedy}. If this is intended, pass require_group=False"
    )
