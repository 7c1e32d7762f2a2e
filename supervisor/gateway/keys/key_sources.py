"""The places that keys are read from: a file of hashed secrets, and secrets in a node's environment.

A secret is never stored and never logged: it is hashed as soon as it is read, and an error quotes the place of a wrong
entry instead of its text. A file without any key is refused, at a reload as at the start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from attrs import field, frozen

from protocol.errors import StartFailed
from protocol.strict.mistakes import Mistakes
from supervisor.config import keyfile, toml_file
from supervisor.config.keyfile import KeySection
from supervisor.files import permissions

KEYS, ADMIN = "ESPALIER_API_KEYS", "ESPALIER_ADMIN_KEY"
SECRET_VARIABLES = frozenset({KEYS, ADMIN})  # environment variables that no other process needs to see
ADMIN_NAME = "admin"
SECRET_BYTES_MAX = 1024
SECRET_CHARACTERS_GOOD = 20  # a shorter secret is accepted, and warned about
FILE_BYTES_MAX = 1024 * 1024


@frozen
class KeySources:
    """The places that keys are read from: a file, and a node's environment."""

    file: Path | None = None
    environment: Mapping[str, str] = field(factory=dict, repr=False)  # its secrets must not be logged

    def read(self) -> dict[str, KeySection]:
        """Return every key by name; raises `StartFailed`, which quotes no secret."""
        sections = {} if self.file is None else _from_file(self.file)
        for name, section in _from_environment(self.environment).items():
            if name in sections:
                raise StartFailed(f"the key {name} stands in {self.file} and in the environment")
            sections[name] = section
        # A file that is emptied by mistake must not revoke every key.
        if self.wanted and not sections:
            raise StartFailed(
                f"there is no key in {self.file}, so nobody could use this server;"
                " to revoke the last key, put another in its place"
            )
        if len(sections) > keyfile.KEYS_MAX:
            raise StartFailed(f"there are {len(sections)} keys; at most {keyfile.KEYS_MAX} are read")
        for mistake in keyfile.disagreements(sections):
            raise StartFailed(str(mistake))
        return sections

    @property
    def wanted(self) -> bool:
        """Whether clients need a key; they do if there is a file of keys, even one that holds none."""
        return self.file is not None or KEYS in self.environment


def digest(secret: str) -> str:
    """Return the SHA-256 of a secret as hexadecimal digits; raises `StartFailed` if no header could carry it."""
    if not 0 < len(secret) <= SECRET_BYTES_MAX or not all(33 <= ord(character) < 127 for character in secret):
        raise StartFailed(f"a key is 1 to {SECRET_BYTES_MAX} visible ASCII characters without spaces")
    return hashlib.sha256(secret.encode()).hexdigest()


def key_file_lines(name: str, secret: str) -> str:
    """Return the lines of a file of keys for one secret; raises `StartFailed` if such a file would be refused."""
    if keyfile.NAME.mistake(name):
        raise StartFailed(f"the name of a key is {keyfile.NAME.words}")
    quoted = name if name.replace("-", "_").isidentifier() or name.isdecimal() else f'"{name}"'
    return f'[key.{quoted}]\nsha256 = "{digest(secret)}"'


def _from_file(path: Path) -> dict[str, KeySection]:
    try:
        if (why := permissions.writable_by_others(path)) is not None:
            raise StartFailed(why)
    except OSError as error:
        raise StartFailed(f"{path} cannot be read: {error.strerror or error}") from error
    data = toml_file.parse(path, toml_file.read_text(path, FILE_BYTES_MAX))
    try:
        return keyfile.read(data)
    except Mistakes as error:
        raise StartFailed(f"{path}: {error}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, KeySection]:
    """Read `name=secret,name2=secret` and the admin's secret; errors number the wrong entry, and quote nothing."""
    found: dict[str, KeySection] = {}
    entries = [entry.strip() for entry in environment.get(KEYS, "").split(",")]
    for number, entry in enumerate(filter(None, entries), start=1):
        name, _, secret = entry.partition("=")
        where = f"{KEYS}: entry {number}"
        # A lone secret in base64 may end in `=`.
        if not secret.strip("=") or keyfile.NAME.mistake(name):
            raise StartFailed(f"{where} is not name=secret with a name of {keyfile.NAME.words}")
        if name in found:
            raise StartFailed(f"{where} has the name of another one")
        found[name] = KeySection(sha256=_digest(where, secret))
    if KEYS in environment and not found:
        raise StartFailed(f"{KEYS} is set, but holds no name=secret")
    if ADMIN in environment:
        if ADMIN_NAME in found:
            raise StartFailed(f"{KEYS} names {ADMIN_NAME}, which is the name of {ADMIN}")
        found[ADMIN_NAME] = KeySection(sha256=_digest(ADMIN, environment[ADMIN]), admin=True)
    return found


def _digest(where: str, secret: str) -> str:
    try:
        return digest(secret)
    except StartFailed as error:
        raise StartFailed(f"{where}: {error}") from error
