"""Text to tokens and back."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from speedrun.data.tokenizer import SEPARATOR, Tokenizer
from speedrun.errors import UserError

POCKET = Tokenizer.load("pocket")


def test_the_pocket_tokenizer_is_what_the_track_says() -> None:
    assert POCKET.vocab_size == 4096
    assert POCKET.bos == 0
    assert POCKET.decode([0]) == SEPARATOR


@given(st.text(max_size=200))
def test_any_text_survives(text: str) -> None:
    ids = POCKET.encode(text)
    assert POCKET.decode(ids) == text
    assert POCKET.encode_batch([text, "other"]) == [ids, POCKET.encode("other")]
    assert all(0 < i < 4096 for i in ids)


@pytest.mark.parametrize("text", [SEPARATOR, f"a{SEPARATOR}b", f"{SEPARATOR}{SEPARATOR}\n", f" {SEPARATOR} "])
def test_text_never_becomes_the_separator(text: str) -> None:
    assert 0 not in POCKET.encode(text)
    assert 0 not in POCKET.encode_batch([text])[0]
    assert POCKET.decode(POCKET.encode(text)) == text


@pytest.mark.parametrize("special", [True, False])
def test_nor_with_a_tokenizer_that_lists_it_carelessly(tmp_path: Path, special: bool) -> None:
    content = json.loads(POCKET.content)
    content["added_tokens"][0] |= {"special": special, "normalized": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.encode(f"a{SEPARATOR}b") == POCKET.encode(f"a{SEPARATOR}b")


def test_settings_for_serving_do_not_change_the_tokens(tmp_path: Path) -> None:
    content = json.loads(POCKET.content)
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path / "tokenizer.json").encode("a long text") == POCKET.encode("a long text")


def test_a_saved_tokenizer_is_the_same_file(tmp_path: Path) -> None:
    POCKET.save(tmp_path / "tokenizer.json")
    assert (tmp_path / "tokenizer.json").read_text(encoding="utf-8") == POCKET.content
    assert Tokenizer.load(str(tmp_path / "tokenizer.json")).encode("some text") == POCKET.encode("some text")


def test_wrong_names_and_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer 'poket'.*Did you mean 'pocket'"):
        Tokenizer.load("poket")
    with pytest.raises(UserError, match="cannot be read"):
        Tokenizer.load(tmp_path)
    for content in ("", "{}", "[1, 2]", '{"model": 3}'):
        (tmp_path / "t.json").write_text(content)
        with pytest.raises(UserError, match=r"not a tokenizer.json"):
            Tokenizer.load(tmp_path / "t.json")
    (tmp_path / "t.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        Tokenizer.load(tmp_path / "t.json")


def test_a_tokenizer_without_a_separator_is_told(tmp_path: Path) -> None:
    content = json.loads(POCKET.content.replace(SEPARATOR, "<|other|>"))
    (tmp_path / "t.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path / "t.json")
    assert tokenizer.decode(tokenizer.encode("text")) == "text"
    with pytest.raises(UserError, match="no token that opens a document"):
        _ = tokenizer.bos


def test_a_tokenizer_that_spells_the_separator_with_itself_is_refused() -> None:
    words = tokenizers.models.WordLevel({"<s>": 0, "a": 1, "?": 2}, unk_token="?")  # byte-level BPE cannot
    tokenizer = Tokenizer(tokenizers.Tokenizer(words).to_str(), "words")
    assert tokenizer.encode("a") == [1]
    with pytest.raises(UserError, match="words turns the text '<s>' into a separator"):
        tokenizer.encode("<s>")
