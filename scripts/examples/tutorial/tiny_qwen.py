"""A tiny Qwen3-VL as transformers saves it, and what it says of charts once it has been trained.

``python scripts/examples/tutorial/tiny_qwen.py make FOLDER`` writes a random model and a tokenizer
of bytes; ``... ask FOLDER DATA`` asks a trained one about charts; ``... tell RUNS`` says what runs
did.
"""

import json
import sys
from pathlib import Path
from statistics import median

import torch
import transformers
from charts import QUESTION
from tiny_llama import SPECIAL, write_tokenizer

from megatron_hdp.data.media import patches_of_picture
from megatron_hdp.media import ENCODERS

_BEGIN, _END, _PICTURE = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
_SIZE, _PATCH, _MERGE, _FRAMES = 64, 16, 4, 2
_ASKED = 40


def make(folder: Path) -> None:
    """Writes model and tokenizer."""
    backend = write_tokenizer(folder, [*SPECIAL, _BEGIN, _END, _PICTURE])
    torch.manual_seed(0)
    text = {
        "vocab_size": 320,
        "hidden_size": _SIZE,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        "eos_token_id": backend.token_to_id(SPECIAL[0]),
        "bos_token_id": None,
    }
    vision = {
        "depth": 4,
        "hidden_size": _SIZE,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": _PATCH,
        "out_hidden_size": _SIZE,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 2],
    }
    tokens = {"vision_start": _BEGIN, "vision_end": _END, "image": _PICTURE}
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        video_token_id=300,  # none is there
        **{f"{name}_token_id": backend.token_to_id(token) for name, token in tokens.items()},
    )
    transformers.Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    print(f"{folder}: a Qwen3-VL of {len(vision['deepstack_visual_indexes']) + 1} levels")


def ask(folder: Path, data: Path) -> None:
    """Prints how many of the first charts' highest bars the model names."""
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (data / "charts.jsonl").read_text().splitlines()]
    right = 0
    for row in rows[:_ASKED]:
        found = _answer(model, tokenizer, data / row["image"])
        right += found == row["conversations"][1]["value"]
    print(
        f"{folder}: {QUESTION} It says {found!r} of the last chart, {right} of {_ASKED} are right"
    )


def _answer(
    model: torch.nn.Module, tokenizer: transformers.PreTrainedTokenizerFast, path: Path
) -> str:
    resizing = ENCODERS["qwen3-vl"].resizing
    picture = patches_of_picture(path.read_bytes(), str(path), resizing)
    values = torch.from_numpy(picture.values).float() / 255 * 2 - 1
    values = values.view(-1, 3, 1, _PATCH**2).repeat(1, 1, _FRAMES, 1).flatten(1)
    pads = _PICTURE * (len(values) // _MERGE)
    prompt = f"<|user|>{_BEGIN}{pads}{_END}{QUESTION}<|end|><|assistant|>"
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    said = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=values,
        image_grid_thw=torch.tensor([picture.grid]),
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
    )
    return tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True)


def tell(runs: Path) -> None:
    """Prints loss, and how evenly ranks encode with each way to balance them."""
    for run, balance in (("home", "home"), ("seeing", "step")):
        steps = [json.loads(line) for line in (runs / f"{run}.jsonl").read_text().splitlines()]
        even = median(step["encoder_efficiency"] for step in steps)
        print(
            f"{balance}: loss {steps[0]['loss']:.2f} to {steps[-1]['loss']:.2f}, "
            f"{median(step['media_items'] for step in steps):.0f} charts and "
            f"{median(step['media_rows'] for step in steps):,.0f} rows a step, "
            f"encoder efficiency {even:.2f}"
        )


if __name__ == "__main__":
    command, *places = sys.argv[1:]
    {"make": make, "ask": ask, "tell": tell}[command](*map(Path, places))
