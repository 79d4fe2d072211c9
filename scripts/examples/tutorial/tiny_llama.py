"""A tiny Llama-3 as transformers saves it, and what it answers when it has learnt something.

``python scripts/examples/tutorial/tiny_llama.py make FOLDER`` writes a random model and a tokenizer
of bytes with a chat template; ``... ask FOLDER QUESTION`` prints positions and answer of a trained
one.
"""

import sys
from pathlib import Path

import tokenizers
import torch
import transformers

_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]


def write_tokenizer(folder: Path, special: list[str]) -> tokenizers.Tokenizer:
    """Writes a tokenizer of bytes whose conversations end with the first of its special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(special)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[0], chat_template=_TEMPLATE
    ).save_pretrained(folder)
    return backend


def make(folder: Path) -> None:
    """Writes model and tokenizer."""
    backend = write_tokenizer(folder, SPECIAL)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=backend.token_to_id(SPECIAL[0]),
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    print(f"{folder}: a Llama of {config.max_position_embeddings} positions")


def ask(folder: Path, question: str) -> None:
    """Prints what the model has learnt of positions, and its answer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    rope = model.config.rope_parameters
    print(
        f"{folder}: {model.config.max_position_embeddings} positions, base {rope['rope_theta']:g}, "
        f"scaling {rope['rope_type']}"
    )
    print(f"{question} {tokenizer.decode(found[0, ids.shape[1] :])!r}")


if __name__ == "__main__":
    command, place, *words = sys.argv[1:]
    make(Path(place)) if command == "make" else ask(Path(place), " ".join(words))
