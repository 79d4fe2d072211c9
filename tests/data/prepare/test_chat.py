"""Conversations become tokens and spans, the same for any number of workers; bad ones are named."""

import json
from pathlib import Path

import pytest

from megatron_hdp.data import TokenFile
from megatron_hdp.data.chat import Conversations
from megatron_hdp.data.spans import Spans
from megatron_hdp.data.tokenizers import build_tokenizer
from tests.data.chat import tiny_tokenizer
from tests.data.prepare.corpora import conversation, names, pair, run

pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")


ROWS = [conversation(number) for number in range(120)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def options(tmp_path):
    return {
        "tokenizer": tiny_tokenizer.write(tmp_path / "hf"),
        "format": "chat",
        "template": "chatml",
        "shard_bytes": 4000,
    }


def test_spans_lie_beside_the_tokens(tmp_path, options):
    path = write(tmp_path / "x.jsonl", ROWS)
    found = {n: run(path, tmp_path / f"cache{n}", workers=n, **options) for n in (0, 2)}
    prefixes = [one.prefix for one in found.values()]
    assert pair(prefixes[0]) == pair(prefixes[1])
    spans = [Path(f"{prefix}.spans") for prefix in prefixes]
    assert spans[0].read_bytes() == spans[1].read_bytes()
    conversations = Conversations(build_tokenizer(options["tokenizer"]), "chatml")
    tokens, trained = TokenFile(prefixes[0]), Spans(spans[0])
    assert len(trained) == len(tokens.lengths)
    for document, row in enumerate(ROWS):
        (expected,) = conversations.render(row)
        length = int(tokens.lengths[document])
        assert tokens.read(document, 0, length).tolist() == expected.ids.tolist()
        assert trained.of(document).tolist() == expected.spans.tolist()
    suffixes = [Path(name).suffix for name in names(tmp_path / "cache0")]
    assert suffixes == [".bin", ".idx", ".json", ".lock", ".spans", ".sums"]


def test_lost_spans_are_made_again(tmp_path, options):
    path = write(tmp_path / "x.jsonl", ROWS)
    found = run(path, tmp_path / "cache", **options)
    spans = Path(f"{found.prefix}.spans")
    whole = spans.read_bytes()
    spans.unlink()
    assert run(path, tmp_path / "cache", **options) == found
    assert spans.read_bytes() == whole


@pytest.mark.parametrize(
    "change", [{"template": None}, {"train_on": "last"}, {"append_eod": False}]
)
def test_whatever_changes_tokens_or_spans_is_another_pair(tmp_path, options, change):
    path = write(tmp_path / "x.jsonl", ROWS)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    options["template"] = str(tmp_path / "t.jinja")
    (tmp_path / "t.jinja").write_text(template)
    first = run(path, tmp_path / "cache", **options)
    assert run(path, tmp_path / "cache", **(options | change)).prefix != first.prefix
    (tmp_path / "t.jinja").write_text(template.replace("<", "["))
    assert run(path, tmp_path / "cache", **options).prefix != first.prefix


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_conversations_are_named_by_line(tmp_path, options, workers):
    bad = [{"messages": []}, {"chosen": [], "rejected": []}]
    path = write(tmp_path / "x.jsonl", [*ROWS[:100], *bad, *ROWS[100:]])
    said = []
    found = run(path, tmp_path / "cache", workers=workers, bad_limit=0.02, said=said, **options)
    assert (found.documents, found.bad) == (120, 2)
    assert f"{path}, line 101: " in said[-1]
    with pytest.raises(ValueError, match=f"2 of 122 .*{path}, line 101: .*; .*line 102: "):
        run(path, tmp_path / "cache", bad_limit=0.01, **options)
    with pytest.raises(ValueError, match=rf"{path}, line 10[12]: "):
        run(path, tmp_path / "strict", workers=workers, **options)


def test_conversations_in_a_table(tmp_path, options):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install 'megatron-hdp[data]'")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "x.parquet", row_group_size=50)
    table = run(tmp_path / "x.parquet", tmp_path / "cache", **options)
    lines = run(write(tmp_path / "x.jsonl", ROWS), tmp_path / "cache", **options)
    assert pair(table.prefix) == pair(lines.prefix)
