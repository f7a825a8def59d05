"""Patterns of users: those that people write are taken, those that could take for ever are not."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_vram.backends import gguf_file
from pytest_vram.errors import BadInput, ModelNotFound
from pytest_vram.sizing import estimate, patterns, placement
from pytest_vram.sizing.options import Device, LlamaOptions
from pytest_vram.sizing.shape import Layer, ModelShape, Tensor
from pytest_vram.testing import recipes

USUAL = [
    r"exps",
    r".*",
    r"\.ffn_(up|down|gate|gate_up)_(ch|)exps",
    r"blk\.(1[0-9]|2[0-9]|3[0-9])\.ffn_.*_exps.*",
    r"blk\.([0-9]|[1-3][0-9])\.ffn_(gate|up|down)_exps\.weight",
    "blk\\.(" + "|".join(map(str, range(61))) + ")\\.ffn_.*",
    r"^blk\.\d+\.attn_[qkv]\.weight$",
    r"([0-9]+)\.ffn_.*exps.*\.weight",
    r".*\.ffn_.*_exps.*\.weight.*",
    r"(?:up|down)+",
    r"[^.]*\.(?!attn)[a-z_]+",
    r"blk\.1{1,2}\.",
    r"a{,}|b{2}c{3,}",
    r"[]|(]*x",
    r"\(\|*",
]
ENDLESS = [
    r"(((((.*)*)*)*)*)x",
    r"(a+)+$",
    r"(a|aa)+$",
    r"(.|a)*x",
    r"(a?){40}x",
    r"([a-z]+_?)*x",
    r"(?:a{1,9}){1,9}x",
    ".*" * 12 + "x",
    "a?" * 40 + "x",
    "(a|a)" * 40 + "x",
    "(a|)" * 40 + "x",
    "(" * 90 + "a" + ")" * 90,
    "a" * 5000,
    "(" * 4000,
]


@pytest.mark.parametrize("text", USUAL)
def test_what_people_write_is_taken(text: str) -> None:
    """Lists of blocks, words and a few wildcards cost nothing."""
    assert patterns.compiled(text, "--override-tensor").pattern == text


@pytest.mark.parametrize("text", ENDLESS, ids=lambda text: text[:12])
def test_what_could_take_for_ever_is_refused(text: str) -> None:
    """One sentence says which option, and what to write instead."""
    with pytest.raises(BadInput, match="^--override-tensor: ") as caught:
        patterns.compiled(text, "--override-tensor")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


pieces = st.recursive(
    st.sampled_from(["a", "b", ".", r"\w", "[ab]", "[^b]", "a|b", "a|ab", ""]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,3}", "{2}", "*?", "{,2}"])).map(
            lambda p: f"({p[0]}){p[1]}"
        ),
        st.tuples(inner, inner).map(lambda p: f"(?:{p[0]}|{p[1]})"),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(pieces)
@example("(a|ab)(a|ab)(a|ab)(a|ab)")
def test_what_is_taken_ends(text: str) -> None:
    """A pattern that is taken comes to an end on names that it almost fits; where it does not, this test hangs."""
    try:
        found = patterns.compiled(f"(?:{text})x", "--override-tensor")
    except BadInput:
        return
    assert found.search("a" * 40) is None
    assert found.search("ab" * 20) is None


def test_the_command_line_refuses_it_too(tmp_path: Path) -> None:
    """The option of an estimate is looked at before anything is matched."""
    path = recipes.llama(tokenizer="none").write(tmp_path / "m.gguf")
    with pytest.raises(BadInput, match="--override-tensor: .* too many ways"):
        estimate(path, override_tensor=f"{ENDLESS[0]}=CPU")


def test_looking_in_many_names_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns that are slow, each within its bound, are given up in the middle of a long table."""
    monkeypatch.setattr(placement, "_MOST_SECONDS", -1.0)
    tensors = tuple(Tensor(name=f"blk.0.{index}", dims=(1,), type="f32", bytes=4) for index in range(3))
    shape = ModelShape(source="x", format="gguf", architecture="llama", layers=(Layer(),), tensors=tensors)
    options = LlamaOptions(devices=(Device(label="gpu0", name="CUDA0"),), override_tensor=(("exps", "CPU"),))
    with pytest.raises(BadInput, match="in 3 names of tensors takes over"):
        placement.place(shape, options)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    """The model of a config file is not opened where that would wait for a writer, or never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises(ModelNotFound, match="is not a regular file"):
            gguf_file.check(tmp_path / name, "model of a test")


def test_counts_of_ways_are_those_of_the_pattern() -> None:
    """A plain pattern is tried from each byte, one with a wildcard from each to each."""
    assert 2 ** patterns._bits("abc") == pytest.approx(64)
    assert 2 ** patterns._bits("a.*c") == pytest.approx(65 * 64 / 2)
    assert re.compile("a.*c").search("abc")
