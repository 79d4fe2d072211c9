"""Tokenizers: ids, ends of documents, and what is said when one cannot be made."""

import json
import pickle
import shutil
import sys

import numpy as np
import pytest

from megatron_hdp.data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    TiktokenTokenizer,
    build_tokenizer,
    tokenizer_identity,
)
from tests.support.processes import run_python

DOCUMENTS = ["def f", "", "aé f\n\n", b"f \xff def", "x </s> def f", "  "]


def ids_of(tokenizer, document):
    return tokenizer.tokenize_batch([document]).ids.tolist()


def test_bytes_are_their_own_ids():
    tokenizer = build_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert ids_of(tokenizer, "aé") == [97, 0xC3, 0xA9]
    assert ids_of(tokenizer, b"\xff\x00") == [255, 0]
    assert ids_of(tokenizer, "\ud800") == [ord("?")]


def change(folder, file="tokenizer_config.json", **changes):
    path = folder / file
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **changes}))


def token(content, number, **flags):
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, **plain, "special": True, **flags}


@pytest.fixture
def hugging_face_folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'megatron-hdp[tokenizers]'")
    vocabulary = {"[UNK]": 0, "</s>": 1, "def": 2, "f": 3}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    named = {"eos_token": "</s>", "unk_token": "[UNK]"}
    change(tmp_path, tokenizer_class="PreTrainedTokenizerFast", **named)
    return tmp_path


def test_hugging_face_folder(hugging_face_folder):
    tokenizer = build_tokenizer(f"hf:{hugging_face_folder}")
    assert (tokenizer.vocab_size, tokenizer.eod) == (4, 1)
    assert ids_of(tokenizer, "def f g") == [2, 3, 0]
    assert ids_of(tokenizer, b"f \xff") == [3, 0]
    ids, places = tokenizer.tokenize_markup("def  f</s>g")
    assert ids.tolist() == [2, 3, 1, 0]
    assert places.tolist() == [0, 5, 6, 10]
    assert tokenizer.special_tokens == {"eos_token": "</s>", "unk_token": "[UNK]"}
    assert (tokenizer.id_of("</s>"), tokenizer.id_of("unknown")) == (1, 0)
    assert tokenizer.chat_template is None


def test_hugging_face_without_an_end_of_text(hugging_face_folder):
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (hugging_face_folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no end-of-text token"):
        build_tokenizer(f"hf:{hugging_face_folder}")


def test_hugging_face_missing_folder(tmp_path):
    for name in (f"{tmp_path}/absent", "./absent", "models/of/mine"):
        with pytest.raises(ValueError, match=f"hf:{name}: found no such folder, expected one with"):
            build_tokenizer(f"hf:{name}")


def test_hugging_face_folder_without_a_tokenizer(tmp_path):
    pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")
    with pytest.raises(ValueError, match="cannot be loaded: expected the folder"):
        build_tokenizer(f"hf:{tmp_path}")


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
    assert ids_of(tokenizer, "a<|") == [97, 60, 124]
    assert 256 not in ids_of(tokenizer, b"<|endoftext|>")
    ids, places = tokenizer.tokenize_markup("é<|endoftext|>a")
    assert ids.tolist() == [0xC3, 0xA9, 256, 97]
    assert places.tolist() == [0, 0, 1, 14]
    assert (tokenizer.id_of("<|endoftext|>"), tokenizer.id_of("none")) == (256, None)
    assert tokenizer.special_tokens == {"eos_token": "<|endoftext|>"}
    assert tokenizer.chat_template is None
    same_as_one_by_one(tokenizer)
    assert pickle.loads(pickle.dumps(tokenizer)).vocab_size == 257
    assert tokenizer_identity("tiktoken:tiny").startswith("tiktoken:tiny@")


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
    monkeypatch.setitem(sys.modules, module, None)
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


def same_as_one_by_one(tokenizer):
    batch = tokenizer.tokenize_batch(DOCUMENTS)
    alone = [ids_of(tokenizer, one) for one in DOCUMENTS]
    assert batch.lengths.tolist() == list(map(len, alone))
    assert batch.ids.tolist() == sum(alone, [])
    assert batch.lengths.dtype == np.int64
    return batch.ids.tolist()


def test_batches_of_bytes():
    same_as_one_by_one(ByteTokenizer())
    assert ByteTokenizer().tokenize_batch([]).lengths.tolist() == []


def library_ids(folder):
    """What transformers itself makes of the documents."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [one if isinstance(one, str) else one.decode(errors="replace") for one in DOCUMENTS]
    ids = [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False)]
    return ids, len(tokenizer), tokenizer.eos_token_id


def byte_level(folder):
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([one for one in DOCUMENTS if isinstance(one, str)], trainer)
    backend.save(str(folder / "tokenizer.json"))


LONGEST = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
STRIPPED = [token("</s>", 0, lstrip=True, rstrip=True)]
DECLARED = {"added_tokens_decoder": {"0": {**token("</s>", 0), "special": False}}}
FOLDERS = {  # whether it is byte level, the file that is changed, and how
    "word level": (False, "tokenizer.json", {}),
    "end declared": (False, "tokenizer.json", {"added_tokens": [token("</s>", 1)]}),
    "byte level": (True, "tokenizer.json", {}),
    "from a model": (True, "config.json", {"model_type": "gpt2"}),
    "spaces stripped": (True, "tokenizer.json", {"added_tokens": STRIPPED}),
    "cut short": (True, "tokenizer.json", {"truncation": LONGEST}),
    "special split": (True, "tokenizer_config.json", {"split_special_tokens": True}),
    "more": (True, "tokenizer_config.json", {"additional_special_tokens": ["x", "def"]}),
    "unknown token added": (True, "tokenizer_config.json", {"pad_token": "f"}),
    "added later": (True, "tokenizer_config.json", DECLARED),
}


def become(folder, name):
    """Make a folder one of these, and give it the library's plain class."""
    is_byte_level, file, changes = FOLDERS[name]
    if is_byte_level:
        byte_level(folder)
    change(folder, file, **changes)
    change(folder, tokenizer_class="PreTrainedTokenizerFast")


CHAT = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("name", "template"),
    [
        *((name, "none") for name in FOLDERS),
        *(("byte level", template) for template in ("settings", "file", "several")),
    ],
)
def test_what_chat_templates_need_is_the_librarys(hugging_face_folder, name, template):
    become(hugging_face_folder, name)
    change(hugging_face_folder, bos_token="f")
    if template == "settings":
        change(hugging_face_folder, chat_template=CHAT)
    if template == "several":
        several = [{"name": one, "template": CHAT + one} for one in ("default", "tools")]
        change(hugging_face_folder, chat_template=several)
    if template == "file":
        change(hugging_face_folder, chat_template="another")
        (hugging_face_folder / "chat_template.jinja").write_text(CHAT)
    tokenizer = build_tokenizer(f"hf:{hugging_face_folder}")
    library = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(hugging_face_folder)
    expected = {"none": None, "several": CHAT + "default"}.get(template, CHAT)
    assert tokenizer.chat_template == expected
    assert library.chat_template in (expected, {"default": expected, "tools": CHAT + "tools"})
    assert tokenizer.special_tokens == {
        key: value for key, value in library.special_tokens_map.items() if isinstance(value, str)
    }
    for token in ("</s>", "f", "def", "no such token"):
        assert tokenizer.id_of(token) == library.convert_tokens_to_ids(token)
    for text in ("aé f</s>", "x </s>  def f\n", "", "e\u0301 def 😀 f"):
        ids, places = tokenizer.tokenize_markup(text)
        found = library(text, add_special_tokens=False, return_offsets_mapping=True)
        assert ids.tolist() == found["input_ids"]
        assert places.tolist() == [begin for begin, _ in found["offset_mapping"]]


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_are_those_of_the_library(hugging_face_folder, name):
    become(hugging_face_folder, name)
    ids, vocab_size, eod = library_ids(hugging_face_folder)
    tokenizer = build_tokenizer(f"hf:{hugging_face_folder}")
    assert same_as_one_by_one(tokenizer) == ids
    assert (tokenizer.vocab_size, tokenizer.eod) == (vocab_size, eod)
    assert same_as_one_by_one(pickle.loads(pickle.dumps(tokenizer))) == ids


def test_the_library_is_left_out_where_the_folder_says_all(hugging_face_folder):
    become(hugging_face_folder, "byte level")
    change(hugging_face_folder, unk_token=None)
    program = (
        "import pickle, sys; from megatron_hdp.data.tokenizers import build_tokenizer; "
        f"made = build_tokenizer('hf:{hugging_face_folder}'); made.tokenize_batch(['def f']); "
        "pickle.loads(pickle.dumps(made)).tokenize_batch(['def f']); "
        "print({'transformers', 'torch', 'tokenizers'} & set(sys.modules))"
    )
    done = run_python("-c", program)
    assert done.stdout.strip() == "{'tokenizers'}"


def test_a_tokenizer_of_python_is_asked_through_the_library(hugging_face_folder, monkeypatch):
    for name in ("whole_backend", "backend_of"):
        monkeypatch.setattr(f"megatron_hdp.data.tokenizers.hugging_face.{name}", lambda one: None)
    tokenizer = build_tokenizer(f"hf:{hugging_face_folder}")
    ids, vocab_size, eod = library_ids(hugging_face_folder)
    assert same_as_one_by_one(tokenizer) == ids
    assert (tokenizer.vocab_size, tokenizer.eod) == (vocab_size, eod)
    assert isinstance(pickle.loads(pickle.dumps(tokenizer)), HuggingFaceTokenizer)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "{"),
        ("tokenizer.json", '{"added_tokens": [], "model": 1}'),
    ],
)
def test_a_damaged_folder_is_named(hugging_face_folder, file, content):
    (hugging_face_folder / file).write_text(content)
    with pytest.raises(ValueError, match=str(hugging_face_folder)):
        build_tokenizer(f"hf:{hugging_face_folder}")


def test_an_identity_is_of_contents(hugging_face_folder, tmp_path):
    name = f"hf:{hugging_face_folder}"
    before = tokenizer_identity(name)
    assert before.startswith("hf:") and tokenizer_identity(name) == before
    (hugging_face_folder / "model.safetensors").write_bytes(b"weights")
    assert tokenizer_identity(name) == before
    copy = shutil.copytree(hugging_face_folder, tmp_path / "elsewhere")
    assert tokenizer_identity(f"hf:{copy}") == before
    change(hugging_face_folder, eos_token="def")
    assert tokenizer_identity(name) != before
    assert tokenizer_identity("byte") == "byte"
    with pytest.raises(ValueError, match="expected byte, hf:PATH"):
        tokenizer_identity("gpt")
