"""A file of --hdp-data is read as it is meant, and each mistake is told with its line."""

import re
from pathlib import Path

import pytest

from megatron_hdp.data import SourceSpec
from megatron_hdp.data.mixture import DataFileError, Phase, Schedule, read_data_file

WHOLE = """
weight-unit: loss-tokens
sources:
  web:   {path: /d/web_text_document}
  code:  {path: "code/*.parquet", key: content, tokenizer: hf:tok, max-epochs: 4,
          long-sequence: split}
  chat:
    path: /d/chat.jsonl.zst
    format: chat
    train-on: last
    template: chatml
    bad-limit: 0.001
  books: {path: /d/books, glob: "*.txt", append-eod: false, tokenise: on-the-fly,
          on-failure: go-on-without}
schedule:
  - {from: 0, weights: {web: 0.7, code: 0.3}, max-length: 8192}
  - from: 50000
    to: 60000
    shape: linear
    weights: {web: 0.4, code: 0.3, chat: 0.2, books: 0.1}
    max-length: 262144
validation: {web: 200, chat: 100}
"""


def written(folder, text):
    path = Path(folder) / "data.yaml"
    path.write_text(text)
    return path


def test_a_whole_file(tmp_path):
    found = read_data_file(written(tmp_path, WHOLE))
    training = found.training
    assert training.weight_unit == "loss-tokens"
    assert training.sources == (
        SourceSpec(name="web", path="/d/web_text_document"),
        SourceSpec(
            name="code",
            path=f"{tmp_path}/code/*.parquet",  # from the file's folder
            key="content",
            tokenizer="hf:tok",
            max_epochs=4,
            long_sequence="split",
        ),
        SourceSpec(
            name="chat",
            path="/d/chat.jsonl.zst",
            format="chat",
            train_on="last",
            template="chatml",
            bad_limit=0.001,
        ),
        SourceSpec(
            name="books",
            path="/d/books",
            glob="*.txt",
            append_eod=False,
            tokenise="on-the-fly",
            on_failure="go-on-without",
        ),
    )
    last = {"web": 0.4, "code": 0.3, "chat": 0.2, "books": 0.1}
    assert training.schedule == Schedule(
        "steps",
        (
            Phase(weights={"web": 0.7, "code": 0.3}, max_length=8192),
            Phase(begin=50000, end=60000, weights=last, max_length=262144),
        ),
    )
    assert training.held_out == {"web": 200, "chat": 100} and not training.takes_held_out
    validation = found.validation
    assert [one.name for one in validation.sources] == ["web", "chat"]
    assert validation.takes_held_out and validation.weight_unit == "sequences"


def test_the_least(tmp_path):
    found = read_data_file(written(tmp_path, "sources: {a: {path: x}}"))
    assert found.training.sources == (SourceSpec(name="a", path=f"{tmp_path}/x"),)
    assert found.training.schedule == Schedule() and found.validation is None


def test_a_template_in_a_file_begins_at_the_folder_too(tmp_path):
    (tmp_path / "my.jinja").write_text("")
    text = "sources: {a: {path: x, template: my.jinja}, b: {path: y, template: chatml}}"
    one, other = read_data_file(written(tmp_path, text)).training.sources
    assert (one.template, other.template) == (f"{tmp_path}/my.jinja", "chatml")


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [("2B", 2 * 10**9, "tokens"), ("1.5m", 1_500_000, "tokens"), ("700", 700, "steps")],
)
def test_a_schedule_by_step_or_token(tmp_path, text, amount, unit):
    body = f"schedule:\n  - {{from: 0, weights: {{a: 1}}}}\n  - {{from: {text}, max-length: 9}}\n"
    found = read_data_file(written(tmp_path, "sources: {a: {path: x}}\n" + body)).training.schedule
    assert (found.unit, found.phases[1].begin, found.phases[1].max_length) == (unit, amount, 9)


A = "sources:\n  a: {path: x}\n  b: {path: y}\n"  # lines 1 to 3
MISTAKES = {
    "no-yaml": ("a: [", "not valid YAML"),
    "a-list": ("- 1", "found a list, expected the keys weight-unit, sources"),
    "empty": ("", "found nothing, expected the keys"),
    "unknown-key": (A + "weigths: {}", "line 4: unknown key 'weigths': did you mean 'weight-unit'"),
    "no-sources": ("schedule: []", "line 1: found no 'sources'"),
    "empty-sources": ("sources: {}", "line 1: found no source, expected at least one"),
    "no-path": ("sources:\n  a: {key: t}", "line 2: source 'a': found no 'path'"),
    "named-twice": (A + "  a: {path: z}", "line 4: found the source 'a' twice"),
    "unit": (A + "weight-unit: words", "found 'words', expected tokens or loss-tokens or seq"),
    "validation": (A + "validation: {c: 1}", "line 4: unknown source 'c'"),
    "validation-size": (A + "validation: {a: 0}", "validation: a: found '0', expected a whole"),
    "path-list": ("sources:\n  a: {path: [x, y]}", "'a': path: found a list, expected a text"),
}
OF_A_SOURCE = {
    "spelling": (
        "tokeniser: byte",
        "line 2: unknown key of source 'a' .*: did you mean 'tokenizer'",
    ),
    "unknown": ("max-epoch: 1", "line 2: unknown key of source 'a' .*: did you mean 'max-epochs'"),
    "format": ("format: csv", "line 2: .*found 'csv', expected auto or"),
    "epochs": ("max-epochs: 0", "found '0', expected a whole number"),
    "half-epochs": ("max-epochs: 1.5", "found '1.5', expected a whole"),
    "bad-limit": ("bad-limit: 2", "found '2', expected .* 0 to 1"),
    "when": ("tokenise: later", "expected ahead or on-the-fly"),
    "failure": (
        "on-failure: x",
        "line 2: .*: found 'x', expected error or go-on-without",
    ),
    "switch": ("append-eod: 1", "found '1', expected true or false"),
}
OF_PHASES = {  # which begin in line 5
    "weight-of-nobody": ("from: 0, weights: {a: 1, c: 1}", "line 5: .* 'c': expected a, b"),
    "no-weight": ("from: 0, weights: {a: 0, b: 0.0}", "line 5: weights: found nothing above 0"),
    "negative": ("from: 0, weights: {a: -1}", "found '-1', expected a number"),
    "nan": ("from: 0, weights: {a: nan}", "found 'nan', expected a number"),
    "late-first": ("from: 5", "line 5: schedule: found a first phase from 5"),
    "no-from": ("max-length: 5", "found a phase without 'from'"),
    "back": ("from: 0|from: 9|from: 4", "line 7: .* from 4 after one from 9, expected phases in"),
    "overlap": (
        "from: 0|from: 2, to: 9, shape: linear|from: 4",
        "line 7: .* inside the range .* 9",
    ),
    "range-back": ("from: 0|from: 9, to: 2, shape: linear", "line 6: .*rises"),
    "to-alone": ("from: 0|from: 2, to: 9", "only one of 'to' and"),
    "units": (
        "from: 0|from: 2B|from: 3000000000",
        "line 7: .* found steps, expected tokens",
    ),
    "no-phase": ("", "line 4: schedule: found an empty list, expected a list of phases"),
    "amount": ("from: 2 billion", "found '2 billion', expected a number of"),
}
MISTAKES |= {name: (f"sources:\n  a: {{path: x, {k}}}", m) for name, (k, m) in OF_A_SOURCE.items()}
for name, (phases, message) in OF_PHASES.items():
    lines = "".join(f"\n  - {{{phase}}}" for phase in phases.split("|"))
    MISTAKES[name] = (f"{A}schedule:{lines if phases else ' []'}", message)


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_with_its_line(tmp_path, case):
    text, message = MISTAKES[case]
    path = written(tmp_path, text)
    with pytest.raises(DataFileError, match=f"^{re.escape(str(path))}.*{message}"):
        read_data_file(path)


def test_a_tokenizers_folder_begins_at_the_files(tmp_path):
    (tmp_path / "tok").mkdir()
    text = "sources: {a: {path: x, tokenizer: hf:tok}, b: {path: x, tokenizer: hf:gpt2}}"
    one, other = read_data_file(written(tmp_path, text)).training.sources
    assert (one.tokenizer, other.tokenizer) == (f"hf:{tmp_path}/tok", "hf:gpt2")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataFileError, match="--hdp-data .*No such file"):
        read_data_file(tmp_path / "none.yaml")


def test_no_python_comes_from_a_file(tmp_path):
    text = "sources: {a: {path: !!python/object/apply:os.getcwd []}}"
    with pytest.raises(DataFileError, match="source 'a': path: found an empty list"):
        read_data_file(written(tmp_path, text))
