"""A small Hugging Face tokenizer: bytes, some whole words, and the special tokens of templates."""

import json

from tests.data.chat.written import TOKENS

SPECIAL = ["<unk>", *TOKENS.values(), "<|im_start|>", "<|im_end|>", "<|eot|>"]
MEGATRON = ["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>"]
WORDS = ["Assistant", "User", "System", "assistant", "user", " hello", "\n\n"]


def write(folder, *, eos="</s>", template=None, special=(*SPECIAL, *MEGATRON), **config):
    """Write the tokenizer's files; ``template`` is a text, or texts by name."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocabulary = {one: i for i, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in WORDS:
        letters = "".join(piece for piece, _ in _bytes_of(pre_tokenizers, word))
        for stop in range(1, len(letters)):
            merge = (letters[:stop], letters[stop])
            merges += [merge] if merge not in merges else []
            vocabulary.setdefault(letters[: stop + 1], len(vocabulary))
    model = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in special])
    folder.mkdir(exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    named = {"eos_token": eos, "bos_token": "<bos>", "unk_token": "<unk>", **config}
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    named |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    kept = {key: value for key, value in named.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    return f"hf:{folder}"


def text_of(tokenizer, ids):
    """The text of ids, as the library tells it."""
    return tokenizer._tokenizer.decode(list(map(int, ids)))


def _bytes_of(pre_tokenizers, word):
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return level.pre_tokenize_str(word)
