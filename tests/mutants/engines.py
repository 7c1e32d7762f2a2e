"""Bugs planted in what a node does about its engines: their settings, their silence, their models."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/engines/sglang/setting_rules.py": (
        Bug("a setting that a key of ours decides is taken", "        return REFUSED[name]\n", "        return None\n"),
        Bug(
            "a grammar backend that nobody bounds is taken",
            'if name == "grammar_backend" and value not in _GRAMMAR_BACKENDS:',
            "if not name:",
        ),
        Bug("true is an integer", 'isinstance(value, bool) is (kind == "boolean")', "True"),
        Bug(
            "a word that SGLang does not know is taken",
            "return None if value in CHOICES[name] else",
            "return None if value else",
        ),
    ),
    "actors/engines/sglang/adapter.py": (
        Bug("a node that stood still blames its engine", "range(PROBES - 1)", "range(1)"),
        Bug("an engine is asked whether it lives without a pause", "        await trio.sleep(probe_s)\n", ""),
        Bug("silence is never noticed", "            if not answer.over.is_set():\n                return\n", ""),
    ),
    "protocol/model_folder.py": (
        Bug(
            "a file that only one end has makes no difference",
            "ours.keys() | theirs.keys()",
            "ours.keys() & theirs.keys()",
        ),
        Bug("a node without weights refuses one that has some", "names.discard(WEIGHTS)", "pass"),
    ),
    "actors/engines/sglang/host/cpu/espalier_cpu_attention.py": (
        Bug(
            "a piece of a prompt does not see what is cached",
            "slice(0 if window is None",
            "slice(prefix if window is None",
        ),
        Bug("a token sees those that come after it", ".tril_(seen - rows)", ""),
        Bug(
            "a sliding window is one token too short",
            ".triu_(seen - rows - window)",
            ".triu_(seen - rows - window + 1)",
        ),
        Bug("the mask grows with the square of a prompt", "ROWS_MAX = 256", "ROWS_MAX = 10**9"),
        Bug("a request gets the answer of another", "        begin += new\n", ""),
        Bug("a model's own scale is not used", '"scale": scaling}', '"scale": None}'),
        Bug("text reads the places of an encoder", "if encoder_lens is not None or is_cross", "if is_cross"),
        Bug("what is behind a window is read", "0 if window is None else max(0, prefix - window)", "0"),
        Bug("a model with short values gets a mask of all rows", " and keys.shape[-1] == values.shape[-1]", ""),
        Bug("a long prefix is computed again", "PREFIX_SHARE_MAX = 1 / 16", "PREFIX_SHARE_MAX = 1.0"),
        Bug("cached positions take the place of new ones", "[len(cached) :]", "[: len(query)]"),
    ),
}
