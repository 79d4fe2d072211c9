"""Answers behind prompts of others: as one cuts and joins the rows by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_hdp.data.mixture import BatchSize, MixtureSpec, Opening, Position, open_corpus
from megatron_hdp.data.spec import SourceSpec
from megatron_hdp.data.steps.unrelated import UnrelatedCorpus


def rows_of(seed, kind):
    """Rows of one form; some prompts are empty."""
    rng = np.random.default_rng(seed)

    def text(least, most):
        return "".join(map(chr, rng.integers(97, 123, rng.integers(least, most))))

    for i in range(9):
        row = {"prompt": text(0, 30)}
        if kind == "pairs":
            yield row | {"chosen": text(2, 60), "rejected": text(2, 60)}
        else:
            yield row | {"completion": text(2, 60), "label": i % 2 == 0}


@pytest.mark.parametrize(("kind", "group"), [("pairs", 2), ("labelled", 1)])
def test_sequences_of_a_step(tmp_path, kind, group):
    sources, rows = [], []
    for seed, name in enumerate("ab"):
        path = tmp_path / f"{name}.jsonl"
        rows.append(list(rows_of(seed, kind)))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[-1]))
        sources.append(SourceSpec(name=name, path=str(path), format=kind))
    spec = MixtureSpec(sources=tuple(sources), origin="data.yaml")
    how = {"tokenizer": "byte", "cache_folder": tmp_path / "cache", "workers": 0}
    corpus = open_corpus(
        spec, Opening(max_length=92, long_sequence="error", say=lambda line: None, **how)
    )
    step = corpus.mixture(corpus.orders(), BatchSize(7), seed=3).step(Position())
    step = replace(step, max_length=40)
    assert len(set(step.sources.tolist())) == 2
    crossed = UnrelatedCorpus(corpus, 92)
    found = crossed.of(step)
    documents = crossed.documents(found).tolist()
    drawn = [
        (i, corpus.sources[i].document(row))
        for i, row in zip(step.sources.tolist(), step.rows.tolist(), strict=True)
    ]
    for k, (prompt, answer) in enumerate(zip(drawn, drawn[-group:] + drawn[:-group], strict=True)):
        assert documents[k] == [*prompt, *answer]
        sides = ("chosen", "rejected") if kind == "pairs" else ("completion",)
        (i, d), (j, e) = prompt, answer
        asked, text = rows[i][d // group], rows[j][e // group]
        parts = [asked["prompt"] or asked[sides[d % group]][:1], text[sides[e % group]]]
        parts[1] = parts[1] if text["prompt"] else parts[1][1:]  # nothing predicts a first token
        expected = [*"".join(parts).encode(), 256][:40]
        first = len(parts[0])
        length, row = int(found.lengths[k]), int(found.rows[k])
        assert length == len(expected) == found.num_labels[k] + 1
        for start, stop in ((0, length), (3, length - 2), (first, length), (0, first)):
            tokens = crossed.tokens(i, row, start, stop - start)
            assert tokens.tolist() == expected[start:stop]
            trained = crossed.is_trained(i, row, start, min(stop, length - 1))
            labels = np.arange(start, min(stop, length - 1)) + 1
            assert trained.tolist() == (labels >= first).tolist()
        assert found.num_loss_tokens[k] == length - first
    assert (found.lengths == 40).any(), "one is cut at its end"
