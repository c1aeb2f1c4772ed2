"""Metrics, notes, completions, curves and the terminal (field cases D048, D071)."""

import gc
import json
import os
import pty
import subprocess
import sys

import numpy as np
import psutil
import pyarrow.parquet
import pytest
import torch

from verl.core.errors import ConfigError, DataError
from verl.core.report import Report, draw_curves, read_metrics
from verl.core.report.display import Curve, Display, duration, printable
from verl.core.report.sinks import redact


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_values_become_plain_floats(tmp_path):
    with Report(tmp_path) as report:
        report.log(1, {"loss": torch.tensor(0.5, requires_grad=True), "n": np.int64(3), "flag": True, "kl": 1})
        with pytest.raises(TypeError, match="metric 'bad': expected one number, got Tensor torch.Size"):
            report.log(2, {"bad": torch.zeros(2)})
        with pytest.raises(TypeError, match="metric 'word'"):
            report.log(2, {"word": "3"})
    row = lines(tmp_path)[0]
    assert {k: row[k] for k in ("loss", "n", "flag", "kl")} == {"loss": 0.5, "n": 3.0, "flag": 1.0, "kl": 1.0}


def test_d071_missing_values_are_absent_and_the_file_is_valid_json(tmp_path):
    with Report(tmp_path) as report:
        report.log(1, {"a": None, "b": float("nan"), "c": float("inf"), "d": torch.tensor(float("nan")), "e": 0.633333})
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert set(row) == {"step", "time", "e"}


def test_each_line_is_on_disk_when_log_returns(tmp_path):
    report = Report(tmp_path)
    report.log(1, {"reward": 0.0})
    assert len(lines(tmp_path)) == 1
    report.close()
    report.close()


def test_a_resumed_run_doubles_no_step(tmp_path):
    with Report(tmp_path) as report:
        for step in range(1, 6):
            report.log(step, {"reward": step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "rew')  # killed while writing
    with Report(tmp_path, first_step=4) as report:
        report.log(4, {"reward": 40})
    assert [(row["step"], row["reward"]) for row in lines(tmp_path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_tensorboard_gets_the_same_and_purges_repeated_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    with Report(tmp_path, ["tensorboard"]) as report:
        for step in (1, 2, 3):
            report.log(step, {"reward": step})
    with Report(tmp_path, ["tensorboard"], first_step=3) as report:
        report.log(3, {"reward": 30})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward")
    assert [(e.step, e.value) for e in events] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_tensorboard_purges_a_run_that_starts_again_from_its_beginning(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    for value in (1, 10):
        with Report(tmp_path, ["tensorboard"]) as report:
            for step in (0, 1):
                report.log(step, {"reward": value})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward")
    assert [(e.step, e.value) for e in events] == [(0, 10.0), (1, 10.0)]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_tracker_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # Python's own way to make an import fail
    with pytest.raises(ConfigError, match=f"report_to: '{name}' needs the package '{name}'.*pip install {name}"):
        Report(tmp_path, [name])


def test_an_unknown_sink_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="report_to: 'tensorbord' is not known; did you mean 'tensorboard'"):
        Report(tmp_path, ["tensorbord"])


class Breaking:
    def __init__(self, run_dir, run_id, first_step, config):
        self.run_id = run_id

    def log(self, step, metrics):
        raise OSError("500 from http://host/?write_token=SECRET")

    def close(self):
        raise AssertionError("a sink that was dropped is not closed")


class Unclosable:
    def __init__(self, run_dir, run_id, first_step, config):
        pass

    def log(self, step, metrics):
        pass

    def close(self):
        raise OSError("no answer from http://host/?write_token=SECRET")


def test_a_tracker_that_cannot_close_does_not_end_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    with Report(tmp_path, ["test_report:Unclosable"]) as report:
        report.log(1, {"reward": 1})
    out = capsys.readouterr().out
    assert "did not close" in out and "SECRET" not in out


def test_a_tracker_that_breaks_does_not_end_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    with Report(tmp_path, ["test_report:Breaking"]) as report:
        report.log(1, {"reward": 1})
        report.log(2, {"reward": 2})
    out = capsys.readouterr().out
    assert len(lines(tmp_path)) == 2 and out.count("stopped taking metrics") == 1
    assert "SECRET" not in out and "SECRET" not in (tmp_path / "notes.txt").read_text()


@pytest.mark.parametrize("text", [
    "http://h:7860/?write_token=SECRET&x=1", "write_token: SECRET", "API_KEY=SECRET", "https://user:SECRET@host/",
    "hf_SECRETSECRET"])
def test_secrets_are_cut_from_what_trackers_say(text):
    assert "SECRET" not in redact(text)


def test_clock_collects_until_the_next_log(tmp_path):
    with Report(tmp_path) as report:
        for _ in range(2):
            with report.clock("generate"):
                pass
        with pytest.raises(ZeroDivisionError), report.clock("train"):
            raise ZeroDivisionError
        report.log(1, {})
        report.log(2, {})
    first, second = lines(tmp_path)
    assert first["timing/generate"] > 0 and first["timing/train"] > 0
    assert not [name for name in second if name.startswith("timing")]


def test_a_note_is_said_once(tmp_path, capsys):
    with Report(tmp_path) as report:
        for _ in range(3):
            report.note("vLLM is not installed: sampling with the built-in engine")
    assert capsys.readouterr().out.count("vLLM") == 1
    assert (tmp_path / "notes.txt").read_text().count("vLLM") == 1


def test_completions_are_stored_whole_and_one_is_shown(tmp_path, capsys):
    rows = [{"prompt": [{"role": "user", "content": "2+2?"}], "completion": "x" * 2000 + "\x1b[31mred\ud800",
             "reward": 0.25, "answer": 4},
            {"prompt": [], "completion": "5", "reward": None, "answer": "four"}]
    with Report(tmp_path) as report:
        path = report.samples(12, rows)
    assert path == tmp_path / "completions" / "step_000012.parquet"
    table = pyarrow.parquet.read_table(path).to_pydict()
    assert table["completion"][0].startswith("x" * 2000) and table["reward"] == [0.25, None]
    assert table["answer"] == ["4", "four"] and json.loads(table["prompt"][0])[0]["content"] == "2+2?"
    out = capsys.readouterr().out
    assert "[user] 2+2?" in out and "reward: 0.25" in out and len(out) < 1500
    assert "\x1b" not in out and "\\x1b[31m" in out, "a completion cannot drive the terminal"


def test_no_rows_still_write_a_file(tmp_path):
    with Report(tmp_path) as report:
        assert pyarrow.parquet.read_table(report.samples(1, [])).num_rows == 0


def test_plain_lines_without_a_terminal(tmp_path, capsys):
    with Report(tmp_path, total_steps=3) as report:
        for step in (1, 2):
            report.log(step, {"reward": step / 4, "tokens_per_second": 1234.5, "kl": 0.01})
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("step 1/3 | reward 0.25 | kl 0.01 | tokens/s 1,23")
    assert "s/step" in out[1] and "left" in out[1] and "\x1b" not in "".join(out)


def test_live_panel_on_a_real_terminal(tmp_path):
    """A child with a pseudo-terminal as its stdout draws the panel and leaves the cursor visible."""
    code = ("from verl.core.report import Report\n"
            f"with Report({str(tmp_path)!r}, total_steps=4) as r:\n"
            "    for s in (1, 2, 3, 4):\n"
            "        with r.clock('train'): pass\n"
            "        r.log(s, {'reward': s / 8, 'tokens_per_second': 5000})\n"
            "    r.note('a [note] with brackets')\n")
    main, child = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k != "CI"} | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=child, stderr=child, env=env)
    os.close(child)
    seen = b""
    try:
        while chunk := os.read(main, 65536):
            seen += chunk
    except OSError:  # the child's end closed
        pass
    os.close(main)
    assert process.wait(30) == 0
    text = seen.decode()
    assert "4 / 4" in text and "5,000" in text and "█" in text and "a [note] with brackets" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_curve_keeps_its_whole_shape_in_bounded_memory():
    curve = Curve(size=16)
    for i in range(10_000):
        curve.add(i)
    assert len(curve.points) < 32 and curve.points == sorted(curve.points)
    assert curve.sparkline(8) == "▁▂▃▄▅▆▇█" and Curve().sparkline() == ""
    flat = Curve()
    flat.add(1.0)
    flat.add(1.0)
    assert flat.sparkline() == "▁▁"


def test_small_words():
    assert [duration(s) for s in (5, 65, 3700, 90000)] == ["5s", "1m 05s", "1h 01m", "1d 01h"]
    assert printable("é漢\t\n\x07\u202e") == "é漢\t\n\\x07\\u202e"


def test_time_left_shrinks(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("verl.core.report.display.time.monotonic", lambda: now[0])
    display = Display(100, live=False)
    for step in range(1, 4):
        now[0] += 10
        display.update(step, {"reward": 0.0})
    assert capsys.readouterr().out.splitlines()[-1].endswith("s/step 10 | left 16m 10s")


def test_draw_curves(tmp_path):
    with Report(tmp_path) as report:
        for step in range(100):
            report.log(step, {"reward": step / 100, "policy_loss": -0.1, "kl": 0.1, "entropy": 1.0,
                              "completions/mean_length": 50} | ({"eval_gsm8k_pass1": 0.5} if step % 10 == 0 else {}))
    path = draw_curves(tmp_path)
    assert path == tmp_path / "curves.png" and path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 20_000


def test_draw_curves_says_what_is_missing(tmp_path):
    with pytest.raises(DataError, match="metrics.jsonl does not exist"):
        draw_curves(tmp_path)
    with Report(tmp_path) as report:
        report.log(1, {"other": 1})
    with pytest.raises(DataError, match="holds none of"):
        draw_curves(tmp_path)
    assert [row["other"] for row in read_metrics(tmp_path)] == [1.0]


def test_d048_memory_does_not_grow_with_steps(tmp_path):
    def tensors():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    weight = torch.ones(1000, requires_grad=True)
    with Report(tmp_path, ["tensorboard"], total_steps=400, live=False) as report:
        for step in range(400):
            report.log(step, {f"m{i}": (weight * i).mean() for i in range(20)} | {"reward": weight.mean()})
            report.note("same")
            if step == 50:
                before, live = psutil.Process().memory_info().rss, tensors()
    assert psutil.Process().memory_info().rss - before < 20e6
    assert tensors() <= live
