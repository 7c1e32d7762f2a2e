"""Identity of a model's folder: a digest of each file that influences answers, compared by name.

A node without engines need not have the weights, so they are compared only if both ends have some.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import TypeAlias

Digest: TypeAlias = tuple[tuple[str, str], ...]
"""Names of files with digests of their content; empty if the folder has not been read."""

PROMPTS = "config_sentence_transformers.json"
"""The file with the prompts that a model of vectors puts before texts."""

POOLING = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json")
"""The files that say how a model makes one vector of a text."""

FILES = (
    "tokenizer.json",
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    PROMPTS,
    *POOLING,
)
"""The files of a model besides its weights; each may be missing."""

TEMPLATES = "additional_chat_templates"
"""A folder of further chat templates, `NAME.jinja`, which have one digest."""

WEIGHTS = "weights"
# Compared only where both ends have it: older versions read some of these not.
NOT_EVERYWHERE = (WEIGHTS, "chat_template.json", TEMPLATES, PROMPTS, *POOLING)
DIGEST_BYTES = 8
ENTRIES_MAX = 16
WORD_MAX = 64  # characters a name or a digest


def digest(files: Mapping[str, bytes]) -> Digest:
    """Return the digests of files by their names; the content may be something that stands for it, such as sizes."""
    digests = {name: blake2b(files[name], digest_size=DIGEST_BYTES).hexdigest() for name in sorted(files)}
    if further := {name: digests.pop(name) for name in [*digests] if name.startswith(f"{TEMPLATES}/")}:
        digests[TEMPLATES] = blake2b(repr(further).encode(), digest_size=DIGEST_BYTES).hexdigest()
    return tuple(sorted(digests.items()))


def mismatch(own: Digest, other: Digest) -> str | None:
    """Return a sentence with the names of the files that differ between two folders, None if no difference is known."""
    if not own or not other:
        return None
    ours, theirs = dict(own), dict(other)
    names = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    names -= {name for name in NOT_EVERYWHERE if name not in ours or name not in theirs}
    return f"its model is another one: it differs in {', '.join(sorted(names))}" if names else None


def is_well_formed(digest: Digest) -> bool:
    """Return whether a digest from another node is within the limits of one."""
    return len(digest) <= ENTRIES_MAX and all(len(word) <= WORD_MAX for entry in digest for word in entry)
