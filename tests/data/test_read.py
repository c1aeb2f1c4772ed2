"""Files come back exactly as they were written, or with an error that names the place."""

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.core.errors import DataError
from verl.data import DataConfig, RLDataLoader, as_tasks
from verl.data.read import from_rows, read

ROWS = [{"prompt": "p", "extra": {"a": 1}, "tools": [{"name": "f", "parameters": {"x": "int"}}]},
        {"prompt": "q", "extra": {"b": 2}, "tools": [{"name": "g", "parameters": {"y": "str"}}]}]


def write(path, text):
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_bom_crlf_blank_lines_and_no_final_newline(tmp_path):
    """Field case D018."""
    raw = bytes.fromhex("efbbbf7b2270726f6d7074223a2261222c22616e73776572223a2231227d0d0a7b2270726f6d7074223a2262222c22"
                        "616e73776572223a2232227d0d0a0d0a7b2270726f6d7074223a2263222c22616e73776572223a2233227d")
    table, = read(write(tmp_path / "a.jsonl", raw))
    assert list(table.rows[0]) == ["prompt", "answer"]
    assert [row["answer"] for row in table.rows] == ["1", "2", "3"]
    assert table.lines == [1, 2, 4]


def test_unicode_line_separators_stay_inside_strings(tmp_path):
    text = "one\u2028two\u2029three\x85four\x0bfive\x0csix\x1cseven"
    path = write(tmp_path / "a.jsonl", json.dumps({"prompt": text}, ensure_ascii=False) + "\n")
    assert [task.prompt for task in as_tasks(path)] == [text]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.dictionaries(st.text(), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6),
    max_size=4), min_size=1, max_size=5))
def test_any_json_row_survives(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("rows")
    text = "\r\n".join(json.dumps(row, ensure_ascii=i % 2 == 0) for i, row in enumerate(rows))
    path = folder / "a.jsonl"
    path.write_bytes(text.encode())
    assert read(path)[0].rows == rows
    path = folder / "a.json"
    path.write_text(json.dumps(rows))
    assert read(path)[0].rows == rows


def test_huge_integers_and_nulls_stay_exact(tmp_path):
    """Field case D026, as JSONL, after a saved and reloaded position, and by way of parquet."""
    path = write(tmp_path / "a.jsonl", '{"prompt": "a", "id": 9007199254740993, "answer": 12345678901234567890}\n'
                                       '{"prompt": "b", "id": null, "answer": 7}\n'
                                       '{"prompt": "c", "id": 1, "answer": 123456789012345678901234567890}\n')
    first, second, third = as_tasks(path)
    assert repr(first.columns) == "{'id': 9007199254740993, 'answer': 12345678901234567890}"
    assert repr(second.columns) == "{'id': None, 'answer': 7}"
    assert repr(third.columns["answer"]) == "123456789012345678901234567890"
    again = RLDataLoader(DataConfig(train=str(path), sampler="in_order"))
    again.load_state(json.loads(json.dumps(RLDataLoader(DataConfig(train=str(path), sampler="in_order")).state())))
    assert [task.columns["answer"] for task in again.take(2)] == [12345678901234567890, 7]
    table = pa.table({"prompt": ["a", "b"], "id": pa.array([9007199254740993, None], pa.int64()),
                      "answer": pa.array([12345678901234567890, 7], pa.uint64())})
    pq.write_table(table, tmp_path / "a.parquet")
    assert [repr(task.columns) for task in as_tasks(tmp_path / "a.parquet")] == [
        "{'id': 9007199254740993, 'answer': 12345678901234567890}", "{'id': None, 'answer': 7}"]


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "arrow file", "arrow stream", "hf parquet", "saved", "dataset"])
def test_struct_fields_are_not_merged_over_rows(tmp_path, form):
    """Field case D063: every form a columnar writer may have produced."""
    data = datasets.Dataset.from_list(ROWS)
    path = tmp_path / form.split()[0]
    if form in ("jsonl", "json"):
        path = write(tmp_path / f"a.{form}", lines(ROWS) if form == "jsonl" else json.dumps(ROWS, indent=1))
    elif form == "parquet":
        path = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif form == "hf parquet":
        path = tmp_path / "a.parquet"
        data.to_parquet(str(path))
    elif form.startswith("arrow"):
        path, table = tmp_path / "a.arrow", pa.Table.from_pylist(ROWS)
        new = pa.ipc.new_file if form == "arrow file" else pa.ipc.new_stream
        with new(str(path), table.schema) as out:
            out.write_table(table)
    elif form == "saved":
        data.save_to_disk(str(path))
    tasks = as_tasks(data if form == "dataset" else path)
    assert [dict(task.columns) for task in tasks] == [{"extra": {"a": 1}}, {"extra": {"b": 2}}]
    assert [task.tools for task in tasks] == [row["tools"] for row in ROWS]


def test_columns_of_the_json_type_of_datasets_are_decoded(tmp_path):
    features = datasets.Features({"prompt": datasets.Value("string"), "extra": datasets.Json()})
    data = datasets.Dataset.from_list([{"prompt": "p", "extra": {"a": None}}, {"prompt": "q", "extra": [1]}],
                                      features=features)
    data.to_parquet(str(tmp_path / "a.parquet"))
    assert [task.columns["extra"] for task in as_tasks(tmp_path / "a.parquet")][1] == [1]


def test_a_null_written_into_jsonl_stays(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"prompt": "p", "extra": {"a": null}}\n')
    assert as_tasks(path)[0].columns == {"extra": {"a": None}}


def test_numpy_values_become_plain_python():
    struct = np.array([{"a": np.int64(1), "b": None, "xs": np.array([2, 3])}], dtype=object)
    table = from_rows([{"prompt": "p", "x": np.float32(0.5), "y": struct, "z": {"kept": None}}])
    assert repr(table.rows[0]) == "{'prompt': 'p', 'x': 0.5, 'y': [{'a': 1, 'xs': [2, 3]}], 'z': {'kept': None}}"


def test_csv_cells_stay_text(tmp_path):
    path = write(tmp_path / "a.csv", '\ufeffprompt,answer\r\n"two\nlines, ""quoted""",007\r\n\r\nb\u2028c,1e3\r\n')
    assert [(t.prompt, t.columns["answer"]) for t in as_tasks(path)] == [
        ('two\nlines, "quoted"', "007"), ("b\u2028c", "1e3")]


def test_lines_under_the_name_json(tmp_path):
    assert len(as_tasks(write(tmp_path / "a.json", lines(ROWS)))) == 2


def test_globs_lists_and_directories(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "x.jsonl", lines([{"prompt": name}]))
    write(tmp_path / "a" / "README.md", "not data")
    assert [t.prompt for t in as_tasks(str(tmp_path / "*" / "*.jsonl"))] == ["a", "b"]
    assert [t.prompt for t in as_tasks(tmp_path)] == ["a", "b"]
    tasks = as_tasks([str(tmp_path / "b"), str(tmp_path / "a" / "x.jsonl")])
    assert [t.prompt for t in tasks] == ["b", "a"]
    assert [t.id for t in tasks] == ["x-0", "x_2-0"]


def test_splits_are_never_mixed_silently(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write(tmp_path / "data" / f"{name}.jsonl", lines([{"prompt": name}]))
    with pytest.raises(DataError, match=r"holds the splits test, train; name one \(data.split: train\)"):
        as_tasks(tmp_path)
    assert [t.prompt[:5] for t in as_tasks(tmp_path, split="train")] == ["train", "train"]
    with pytest.raises(DataError, match="no file of split 'dev'"):
        as_tasks(tmp_path, split="dev")
    both = datasets.DatasetDict({s: datasets.Dataset.from_list([{"prompt": s}]) for s in ("train", "test")})
    both.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="set data.split to one of train, test"):
        as_tasks(tmp_path / "saved")
    assert as_tasks(tmp_path / "saved", split="test")[0].prompt == "test"
    with pytest.raises(DataError, match=r"dataset\['train'\]"):
        as_tasks(both)


def test_dataset_scripts_are_never_run(tmp_path):
    """Field case D067, the dataset's part."""
    folder, marker = tmp_path / "data", tmp_path / "marker"
    folder.mkdir()
    write(folder / "data.py", f"open({str(marker)!r}, 'w').write('x')\n")
    with pytest.raises(DataError, match="data.py is not run .*convert the data to JSONL"):
        as_tasks(folder)
    write(folder / "rows.jsonl", lines([{"prompt": "p"}]))
    assert len(as_tasks(folder)) == 1
    assert not marker.exists()


@pytest.mark.parametrize("name, content, message", [
    ("a.jsonl", '{"prompt": "a"}\n\n{"prompt": \n', r"a.jsonl, line 3 \(row 1\): not valid JSON"),
    ("a.jsonl", "[1]\n", "line 1: a row must be a JSON object, saw list"),
    ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "\xe9"}\n', "line 2: byte 0xe9 is not UTF-8"),
    ("a.jsonl", '{"prompt": ' + "[" * 100_000, "line 1"),
    ("a.jsonl", "\n\n", "holds no rows"),
    ("a.json", '[{"prompt": "a"}, 3]', "row 1: a row must be a JSON object, saw int"),
    ("a.json", '[{"prompt": "a"}', "not valid JSON"),
    ("a.csv", "prompt,answer\na,1\nb\n", r"line 3 \(row 1\): 1 cells under 2 column names"),
    ("a.csv", "prompt,prompt\na,1\n", "stands twice"),
    ("a.csv", 'prompt\n"a"b\n', "not valid CSV"),
    ("a.parquet", "PAR1", "cannot be read as parquet"),
    ("a.arrow", "nothing", "cannot be read as arrow"),
    ("a.txt", "hello", "unknown file type '.txt'; allowed: .jsonl"),
])
def test_errors_name_file_and_place(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message) as caught:
        as_tasks(write(tmp_path / name, content))
    assert name in str(caught.value)


def test_a_path_that_is_not_there():
    with pytest.raises(DataError, match="no such file or directory .*hf download --repo-type dataset openai/gsm8k"):
        as_tasks("openai/gsm8k")
    with pytest.raises(DataError, match="data.train is not set"):
        RLDataLoader(DataConfig())
    with pytest.raises(DataError, match="row 1: expected a dict .* saw str"):
        as_tasks([{"prompt": "a"}, "b"])
    with pytest.raises(DataError, match="cannot read prompts from int"):
        as_tasks(3)
    with pytest.raises(DataError, match="give rows as a list of dicts"):
        as_tasks({"prompt": ["a", "b"]})
    with pytest.raises(DataError, match="holds no rows"):
        as_tasks([])
