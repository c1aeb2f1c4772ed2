"""Every dataset kind becomes a Task; every row that is none is named with its place and the fix."""

import json
from pathlib import PurePosixPath

import pytest

from verl.core.errors import DataError
from verl.core.types import Task
from verl.data import DataConfig, as_tasks, kind_of

USER, OTHER = {"role": "user", "content": "q"}, {"role": "user", "content": "r"}
YES, NO = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}


def one(row, **settings):
    return as_tasks([row], DataConfig(**settings))[0]


@pytest.mark.parametrize("row, kind, prompt", [
    ({"text": "all of it"}, "language", ""),
    ({"messages": [USER, YES]}, "language", []),
    ({"prompt": "q"}, "prompt", "q"),
    ({"prompt": [USER]}, "prompt", [USER]),
    ({"prompt": "q", "label": "42"}, "prompt", "q"),
    ({"prompt": "q", "completion": "yes"}, "completion", "q"),
    ({"prompt": [USER], "completion": [YES]}, "completion", [USER]),
    ({"prompt": "q", "chosen": "yes", "rejected": "no"}, "preference", "q"),
    ({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, "preference", [USER]),
    ({"chosen": "The sky is blue", "rejected": "The sky is green"}, "preference", "The sky is"),
    ({"chosen": [USER, YES], "rejected": [USER, NO]}, "preference", [USER]),
    ({"prompt": "q", "chosen": [USER, YES], "rejected": [USER, NO]}, "preference", [USER]),
    ({"prompt": [USER], "chosen": [USER, YES], "rejected": [USER, NO]}, "preference", [USER]),
    ({"prompt": "q", "completion": "yes", "label": True}, "unpaired", "q"),
    ({"prompt": [USER], "completion": [YES], "label": 0}, "unpaired", [USER]),
])
def test_kinds(row, kind, prompt):
    task = one(row)
    assert (kind_of(task), task.prompt) == (kind, prompt)
    if kind == "preference":
        assert [task.chosen, task.rejected] in (["yes", "no"], [[YES], [NO]], [" blue", " green"])
    if kind == "unpaired":
        assert task.label is bool(row["label"])


def test_other_columns_stay_exact():
    row = {"prompt": "q", "answer": 7, "label": None, "margin": 0.5, "uid": "../../u", "text": {"x": None}}
    assert dict(one(row).columns) == {k: v for k, v in row.items() if k != "prompt"}
    assert one({"prompt": "q", "chosen": "a", "rejected": "b", "margin": 2}).columns == {"margin": 2}


def test_ids_are_safe_as_file_names(tmp_path):
    """Field case D069: nothing a file or a row is called can lead out of a folder."""
    path = tmp_path / "..weird name;rm.jsonl"
    path.write_text('{"prompt": "q", "uid": "../../u", "id": "../x"}\n')
    task, = as_tasks(path)
    assert task.id == "__weird_name_rm-0"
    assert PurePosixPath(task.id).parts == (task.id,)


def test_duplicate_rows_are_kept_apart():
    tasks = as_tasks([{"prompt": "q"}] * 3)
    assert len({task.id for task in tasks}) == 3


def test_columns_are_renamed():
    task = one({"question": "q", "final": "7", "prompt": "template"}, columns={"prompt": "question", "answer": "final"})
    assert (task.prompt, dict(task.columns)) == ("q", {"answer": "7"})
    with pytest.raises(DataError, match=r"data.columns reads 'prompt' from column 'qestion'.*did you mean 'question'"):
        one({"question": "q"}, columns={"prompt": "qestion"})


@pytest.mark.parametrize("value, expected", [
    ('[{"name":"f"}]', [{"name": "f"}]), ([{"name": "f"}], [{"name": "f"}]), ([], None), ("", None), (None, None),
    ("[]", None), ({"name": "f"}, DataError), ("[not json", DataError), (["f"], DataError), (3, DataError)])
def test_tools_as_objects_or_json_text(value, expected):
    """Field case D028."""
    row = {"prompt": [USER], "tools": value}
    if expected is DataError:
        with pytest.raises(DataError, match="row 0, column tools"):
            one(row)
    else:
        assert one(row).tools == expected


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}])
@pytest.mark.parametrize("shape", [lambda call: {"type": "function", "function": call}, lambda call: call])
def test_tool_call_arguments_as_objects_or_json_text(arguments, shape):
    """Field case D028: arguments become dicts, and a message without calls is accepted in every spelling."""
    calls = [shape({"name": "f", "arguments": arguments})]
    prompt = [{**USER, "tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": calls},
              {"role": "assistant", "content": None, "tool_calls": json.dumps(calls)},
              {"role": "tool", "content": "1", "name": None}]
    made = one({"prompt": prompt}).prompt
    assert made[1]["tool_calls"] == made[2]["tool_calls"] == [shape({"name": "f", "arguments": {"x": 1}})]
    assert made[0] == USER and made[1]["content"] == "" and made[3] == {"role": "tool", "content": "1"}


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert one({"prompt": [{"role": "user", "content": parts}]}).prompt[0]["content"] == "ab"


def test_messages_and_template_kwargs_as_json_text():
    task = one({"messages": json.dumps([USER, YES]), "chat_template_kwargs": '{"enable_thinking": false}'})
    assert (task.completion, task.template_kwargs) == ([USER, YES], {"enable_thinking": False})


@pytest.mark.parametrize("row, message", [
    ({"question": "q"}, r"columns seen: question; .*data.columns, e.g. \{prompt: question\}"),
    ({"prompt": None}, "row 0, column prompt: expected a string or a list .* saw nothing"),
    ({"prompt": ""}, "row 0, column prompt: is empty; remove the row"),
    ({"prompt": []}, "column prompt: expected"),
    ({"prompt": 3}, "saw int 3"),
    ({"prompt": "a\ud800"}, "half of a surrogate pair"),
    ({"prompt": [{"from": "human", "value": "q"}]}, "message 0: has from / value; write role"),
    ({"prompt": [{"content": "q"}]}, r"message 0: expected \{role"),
    ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]}, "only text parts"),
    ({"prompt": [{"role": "user", "content": 3}]}, "content: expected a string"),
    ({"prompt": [{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{x"}]}]},
     "arguments of f: not valid JSON"),
    ({"prompt": [{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": [1]}]}]},
     "arguments of f: expected an object"),
    ({"prompt": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}, "tool_calls: expected"),
    ({"prompt": "q", "completion": [YES]}, "a string and messages; write both as strings or both as messages"),
    ({"prompt": [USER], "completion": [OTHER, YES]},
     "column completion: an answer begins with an assistant message, saw role 'user'"),
    ({"chosen": [USER, OTHER], "rejected": [USER, YES]}, "column chosen: an answer begins with an assistant"),
    ({"prompt": "q", "completion": None}, "column completion: expected"),
    ({"prompt": "q", "completion": "a", "label": None}, "column label: expected true"),
    ({"prompt": "q", "completion": "a", "label": 0.5}, "column label"),
    ({"prompt": "q", "chosen": "a", "rejected": [NO]}, "columns chosen and rejected: a string and messages"),
    ({"prompt": [USER], "chosen": "a", "rejected": "b"}, "columns prompt and chosen: messages and a string"),
    ({"chosen": "abc", "rejected": "xyz"}, "share no beginning, so no prompt can be found; add a prompt column"),
    ({"chosen": "abc", "rejected": "abc"}, "do not differ"),
    ({"chosen": [USER, YES], "rejected": [OTHER, NO]}, "share no beginning"),
    ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": "1"}, "column margin: expected a finite number"),
    ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": float("nan")}, "column margin"),
    ({"prompt": "q", "completions": ["a"], "labels": [True]}, "stepwise rows .* are not supported"),
    ({"messages": [USER]}, r"no assistant message.*\{prompt: messages\}"),
    ({"messages": "[not json"}, "column messages: not valid JSON"),
    ({"prompt": "q", "images": ["x.png"]}, "image inputs are not supported"),
    ({"prompt": "q", "chat_template_kwargs": [1]}, "column chat_template_kwargs: expected an object"),
])
def test_errors_name_row_column_and_fix(row, message):
    with pytest.raises(DataError, match=message):
        one(row)


def test_errors_name_the_line_of_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": null}\n')
    with pytest.raises(DataError, match=r"a.jsonl, row 1 \(line 3\), column prompt"):
        as_tasks(path)


def test_labels_of_csv(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion,label\nq,a,True\nq,b,false\nq,,1\n")
    assert [(t.completion, t.label) for t in as_tasks(path)] == [("a", True), ("b", False), ("", True)]


def test_tasks_pass_through():
    tasks = [Task("x", "q")]
    assert as_tasks(tasks) == tasks
