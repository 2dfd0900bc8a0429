"""docs/troubleshooting.md holds a cure for every message that the sources can raise."""

import re

from docs.messages import (
    GAP,
    ROOT,
    all_messages,
    cmake_messages,
    handler_messages,
    python_messages,
    starlark_messages,
)

# Shorter entries must be a message as it stands: "… must be …" would cover almost anything.
ENOUGH_TO_RECOGNISE = 18


def entries() -> list[str]:
    """The messages of the page: what stands in quotes on the line above a cure."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    terms = re.findall(r"^(`.+`)\n: \S", text, flags=re.MULTILINE)
    return [entry for term in terms for entry in re.findall(r"`([^`]+)`", term)]


def covers(entry: str, message: str) -> bool:
    """Whether a user who got this message finds it under this entry."""
    if entry.rstrip(".") == message.rstrip("."):
        return True
    if len(entry.replace(GAP, "").strip()) < ENOUGH_TO_RECOGNISE:
        return False
    pattern = ".*".join(re.escape(part) for part in entry.split(GAP))
    return re.match(pattern, message.strip(), flags=re.DOTALL) is not None


ENTRIES = entries()
MESSAGES = all_messages()


def test_every_message_has_a_cure():
    missing = [m for m in MESSAGES if not any(covers(entry, m.text) for entry in ENTRIES)]
    assert len(MESSAGES) > 100
    assert missing == [], "docs/troubleshooting.md wants an entry for each of these"


def test_every_entry_is_a_message():
    stale = [entry for entry in ENTRIES if not any(covers(entry, m.text) for m in MESSAGES)]
    assert stale == [], "docs/troubleshooting.md cures what nobody raises"


def test_an_unknown_message_is_noticed():
    """What the first test must tell apart: a message nobody wrote down."""
    unknown = "key must have a stride that the kernel likes; got …."
    assert not any(covers(entry, unknown) for entry in ENTRIES)


def test_no_entry_stands_twice():
    assert len(set(ENTRIES)) == len(ENTRIES)


def test_python_messages_are_read():
    source = """
RULE = "a rule; got {value}."
def f(name, x):
    raise ValueError(f"{name}: x must be " + f"small; got {x}.")
    raise TypeError(RULE.format(value=x))
    raise
def missing_reason():
    part = "no way"
    return f"{part} to {x}"
"""
    found = [message.text for message in python_messages(source, "file")]
    assert sorted(found) == ["a rule; got ….", "no way to …", "x must be small; got …."]


def test_handler_and_build_messages_are_read():
    source = 'require(a == b(c), std::string(name) + " must be (so); got " + text(x) + ".");'
    assert [m.text for m in handler_messages(source, "file")] == [" must be (so); got …."]
    source = 'message(FATAL_ERROR "jax_fa3: no ${X} "\n "here.")'
    assert [m.text for m in cmake_messages(source, "file")] == ["no … here."]
    source = 'def f(x):\n    fail("jax_fa3: no " + x)\n    fail("jax_fa3: %s is not %s." % (x, x))'
    assert [m.text for m in starlark_messages(source, "file")] == ["no …", "… is not …."]
