"""Tokenizers: ids, ends of documents, and what is said when one cannot be made."""

import json
import sys

import numpy as np
import pytest

from megatron_hdp.data import ByteTokenizer, build_tokenizer
from megatron_hdp.data.tokenizers import TiktokenTokenizer


def test_bytes_are_their_own_ids():
    tokenizer = build_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.tokenize("aé").tolist() == [97, 0xC3, 0xA9]
    assert tokenizer.tokenize_bytes(b"\xff\x00").tolist() == [255, 0]
    assert tokenizer.tokenize("").dtype == np.int64
    assert tokenizer.tokenize("\ud800").tolist() == [ord("?")]


def test_bytes_detokenize():
    tokenizer = ByteTokenizer()
    text = "hello, wörld"
    assert tokenizer.detokenize([*tokenizer.tokenize(text), tokenizer.eod]) == text


@pytest.fixture
def hugging_face_folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'megatron-hdp[tokenizers]'")
    vocabulary = {"[UNK]": 0, "</s>": 1, "def": 2, "f": 3}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "unk_token": "[UNK]",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_hugging_face_folder(hugging_face_folder):
    tokenizer = build_tokenizer(f"hf:{hugging_face_folder}")
    assert (tokenizer.vocab_size, tokenizer.eod) == (4, 1)
    assert tokenizer.tokenize("def f g").tolist() == [2, 3, 0]
    assert tokenizer.tokenize_bytes(b"f \xff").tolist() == [3, 0]
    assert tokenizer.detokenize([2, 3]) == "def f"


def test_hugging_face_without_an_end_of_text(hugging_face_folder):
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (hugging_face_folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no end-of-text token"):
        build_tokenizer(f"hf:{hugging_face_folder}")


def test_hugging_face_missing_folder(tmp_path):
    pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")
    with pytest.raises(ValueError, match="cannot be loaded: expected the folder"):
        build_tokenizer(f"hf:{tmp_path}/absent")


@pytest.fixture
def tiny_encoding(monkeypatch):
    """A tiktoken encoding that needs no download: single bytes and one special token."""
    tiktoken = pytest.importorskip("tiktoken", reason="pip install 'megatron-hdp[tokenizers]'")
    encoding = tiktoken.Encoding(
        "tiny",
        pat_str=r"\w+|\W",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 256},
    )
    monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: ["tiny"])
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    return tiktoken


def test_tiktoken(tiny_encoding):
    tokenizer = build_tokenizer("tiktoken:tiny")
    assert isinstance(tokenizer, TiktokenTokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.tokenize("a<|").tolist() == [97, 60, 124]
    assert 256 not in tokenizer.tokenize_bytes(b"<|endoftext|>")
    assert tokenizer.detokenize(np.array([97, 98])) == "ab"


def test_tiktoken_unknown_name(tiny_encoding):
    with pytest.raises(ValueError, match="tiktoken:large is unknown: expected one of tiny"):
        build_tokenizer("tiktoken:large")


def test_tiktoken_without_network(tiny_encoding, monkeypatch):
    def fail(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiny_encoding, "get_encoding", fail)
    with pytest.raises(ValueError, match="no route to host.*TIKTOKEN_CACHE_DIR"):
        build_tokenizer("tiktoken:tiny")


@pytest.mark.parametrize(
    ("specification", "module"), [("hf:gpt2", "transformers"), ("tiktoken:gpt2", "tiktoken")]
)
def test_a_missing_library_names_the_extra(specification, module, monkeypatch):
    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name == module:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(ImportError, match=r"pip install 'megatron-hdp\[tokenizers\]'"):
        build_tokenizer(specification)


@pytest.mark.parametrize("specification", ["", "bytes", "hf:", "tiktoken", "gpt2:x"])
def test_bad_specification(specification):
    with pytest.raises(ValueError, match="expected byte, hf:PATH"):
        build_tokenizer(specification)


def test_places_of_bytes():
    ids, places = ByteTokenizer().tokenize_markup("aé€😀\ud800b")
    assert bytes(ids.tolist()) == "aé€😀?b".encode()
    assert places.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 5]
    assert [len(one) for one in ByteTokenizer().tokenize_markup("")] == [0, 0]
    assert (ByteTokenizer().id_of("a"), ByteTokenizer().id_of("ab")) == (97, None)
    assert (ByteTokenizer().chat_template, ByteTokenizer().special_tokens) == (None, {})


def test_markup_of_hugging_face(hugging_face_folder):
    tokenizer = build_tokenizer(f"hf:{hugging_face_folder}")
    ids, places = tokenizer.tokenize_markup("def  f</s>g")
    assert ids.tolist() == [2, 3, 1, 0]
    assert places.tolist() == [0, 5, 6, 10]
    assert tokenizer.special_tokens == {"eos_token": "</s>", "unk_token": "[UNK]"}
    assert (tokenizer.id_of("</s>"), tokenizer.id_of("unknown")) == (1, 0)
    assert tokenizer.chat_template is None


def test_markup_of_tiktoken(tiny_encoding):
    tokenizer = build_tokenizer("tiktoken:tiny")
    ids, places = tokenizer.tokenize_markup("é<|endoftext|>a")
    assert ids.tolist() == [0xC3, 0xA9, 256, 97]
    assert places.tolist() == [0, 0, 1, 14]
    assert (tokenizer.id_of("<|endoftext|>"), tokenizer.id_of("none")) == (256, None)
    assert tokenizer.special_tokens == {"eos_token": "<|endoftext|>"}
    assert tokenizer.chat_template is None
