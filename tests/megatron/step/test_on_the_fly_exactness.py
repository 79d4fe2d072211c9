"""Gradients over text and conversations that are tokenised on the fly: those of sequences alone."""

import json

import pytest

from tests.support.gradients import errors_of, tiny_arguments, write_corpus

TOLERANCE = 1e-10
DATA = """
sources:
  tokens: {path: tokens/corpus, long-sequence: truncate}
  text: {path: text.jsonl, tokenise: on-the-fly, bad-limit: 0.5}
  chat: {path: chat.jsonl, format: chat, template: chatml, tokenise: on-the-fly}
schedule: [{from: 0, weights: {tokens: 0.3, text: 0.3, chat: 0.4}, max-length: 60}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Beside tokens: text with records that are bad or empty, and conversations."""
    pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
    folder = tmp_path_factory.mktemp("sources")
    (folder / "tokens").mkdir()
    write_corpus(folder / "tokens", [30, 3, 64, 20])
    texts = [json.dumps({"text": "abc " * number}) for number in range(1, 20, 3)]
    (folder / "text.jsonl").write_text("\n".join(["{", *texts, '{"text": ""}']))
    roles = ("user", "assistant", "user", "assistant")
    rows = [
        {"messages": [{"role": role, "content": f"{i} is {role}"} for role in roles[: 2 + i % 3]]}
        for i in range(6)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "data.yaml").write_text(DATA)
    return folder


def test_gradients_over_what_is_tokenised_on_the_fly(run_ranks, folder):
    arguments = tiny_arguments(
        str(folder / "tokens" / "corpus"),
        data_path=(),
        hdp_data=folder / "data.yaml",
        tokenizer_type="byte",
        global_batch_size=14,
    )
    assert max(run_ranks(2, errors_of, [(arguments, None)])[0]) <= TOLERANCE
