"""HTTP rewards and judges against a real server on 127.0.0.1, and people's scores from columns and growing files."""

import http.server
import json
import threading
import time

import pytest
from reward_samples import group

from verl.core.errors import ConfigError, DataError, RewardError
from verl.core.types import Abstained, Failed
from verl.rewards import JudgeSettings, RewardSource, Scorer, build_rewards
from verl.rewards.judge import parse_score
from verl.rewards.remote import ATTEMPTS, RemoteError, post_json


@pytest.fixture
def server(monkeypatch):
    """`server.reply(body, headers) -> (status, text or bytes, headers)` answers; `server.seen` holds the bodies."""
    monkeypatch.setenv("no_proxy", "*")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                made.seen.append(body)
                made.active += 1
                made.peak = max(made.peak, made.active)
            status, text, headers = made.reply(body, self.headers)
            with lock:
                made.active -= 1
            if status == 0:  # hang up without an answer
                self.connection.close()
                return
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    lock = threading.Lock()
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.seen, made.active, made.peak = [], 0, 0
    made.url = f"http://127.0.0.1:{made.server_port}"
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()


def run(source, *groups):
    rewards = build_rewards([source])
    try:
        metrics = Scorer(rewards).score(groups)
    finally:
        rewards.close()
    return [s.score for g in groups for s in g.samples], metrics


def test_two_lines_of_config_score_over_http(server):
    server.reply = lambda body, _: (200, json.dumps({"score": len(body["completion"]) or None}), {})
    scores, _ = run({"http": server.url, "weight": 2.0}, group(["abc", "", "x"], answer=7))
    assert scores == [6.0, None, 2.0]
    assert {"prompt": "question", "completion": "abc", "columns": {"answer": 7}} in server.seen


@pytest.mark.parametrize("status", [408, 429, 500, 503, 0])
def test_what_can_heal_is_retried(server, status):
    server.reply = lambda *_: (200, '{"score": 1}', {}) if len(server.seen) > 2 else (status, "busy", {})
    waits = []
    assert post_json(server.url, {}, 30.0, sleep=waits.append) == {"score": 1}
    assert len(server.seen) == 3 and waits == [0.25, 0.5]


def test_retry_after_is_respected_and_attempts_are_bounded(server):
    server.reply = lambda *_: (429, "slow down", {"Retry-After": "3"})
    waits = []
    with pytest.raises(RemoteError, match="HTTP 429.*slow down.*after 4 attempt"):
        post_json(server.url, {}, 30.0, sleep=waits.append)
    assert len(server.seen) == ATTEMPTS and all(2.9 < w <= 3 for w in waits)


@pytest.mark.parametrize("status, text, message", [(400, "no", "HTTP 400"), (401, "key", "HTTP 401"), (404, "", "HTTP 404"),
                                                   (200, "<html>", "not JSON")])
def test_what_cannot_heal_fails_at_once(server, status, text, message):
    server.reply = lambda *_: (status, text, {})
    with pytest.raises(RemoteError, match=message):
        post_json(server.url, {}, 30.0)
    assert len(server.seen) == 1


def test_a_deadline_ends_all_attempts_together(server):
    server.reply = lambda *_: (time.sleep(3), (200, "{}", {}))[1]
    start = time.monotonic()
    with pytest.raises(RemoteError, match="timed out"):
        post_json(server.url, {}, 0.3)
    assert time.monotonic() - start < 2.5 and len(server.seen) == 1


def test_failures_are_per_item_and_concurrency_is_bounded(server):
    def reply(body, _):
        time.sleep(0.05)
        return (200, '{"score": 1}', {}) if body["completion"] != "bad" else (200, '{"score": "high"}', {})

    server.reply = reply
    g = group(["a", "bad", "b", "c", "d", "e"])
    scores, metrics = run(RewardSource(http=server.url, concurrency=2, failure_budget=0.2), g)
    assert scores == [1, None, 1, 1, 1, 1] and server.peak == 2
    assert "'high' of type str" in g.samples[1].rewards["http"].reason and metrics["rewards/http/failure_rate"] == 1 / 6


def test_a_dead_service_stops_the_run_with_its_address(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(RewardError, match=rf"(?s)all of them failed.*{server.url}.*refused"):
        run(RewardSource(http=server.url, timeout_s=0.5), group(["a"]))
    with pytest.raises(ConfigError, match="not an http:// or https:// URL"):
        build_rewards([{"http": "file:///etc/passwd"}])


@pytest.mark.parametrize("reply, value", [
    ("Score: 8", 8), ("Score: 10", 10), ("score:7.5.", 7.5), ("**Score:** 9", 9), ("Score: **8**\n", 8), ("Score: 8/10", 8),
    ("Score: 3\nno, Score: 4", 4), ("Score: 0", 0), ("Score: 6, since", 6), ("Score: 8 because 2 is right", 8),
    ("Score: 11", None), ("Score: -1", None), ("Score: 7-8", None), ("Score: 7 to 8", None), ("Score: 8/100", None),
    ("Score: eight", None), ("8", None), ("", None), ("Score:", None), ("Score: 1,5", None), ("Score: 8x", None),
    ("Score: 5\nScore: ?", None), ("Score: nan", None), ("Score: 1.2.3", None), ("Score: 10%", None),
])
def test_a_judges_number_is_read_whole_or_not_at_all(reply, value):
    if value is None:
        with pytest.raises(ValueError):
            parse_score(reply, "Score:", 0.0, 10.0)
    else:
        assert parse_score(reply, "Score:", 0.0, 10.0) == value


def test_an_openai_compatible_judge(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k1")
    keys = []

    def reply(body, headers):
        keys.append(headers["Authorization"])
        content = body["messages"][0]["content"]
        text = "Score: 9" if "[good {answer}]" in content and "key=42" in content else "I cannot say."
        return 200, json.dumps({"choices": [{"message": {"content": text}}]}), {}

    server.reply = reply
    judge = JudgeSettings(url=server.url + "/v1", template="Q {prompt} key={answer}: [{completion}]", api_key_env="JUDGE_KEY")
    g = group(["good {answer}", "bad"], answer="42")
    source = RewardSource(judge=judge, failure_budget=0.5)
    build_rewards([source]).check([g.task])
    scores, _ = run(source, g)
    assert scores == [9.0, None] and keys == ["Bearer k1"] * 2  # braces in a response stay text
    assert isinstance(g.samples[1].rewards["judge"], Failed) and "I cannot say" in g.samples[1].rewards["judge"].reason
    with pytest.raises(DataError, match="asks for {answer}.*did you mean 'answers'"):
        build_rewards([source]).check([group(["x"], answers=1).task])
    with pytest.raises(ConfigError, match="never shows"):
        build_rewards([RewardSource(judge=JudgeSettings(url=server.url, template="rate it"))])


def test_an_engine_judges_with_its_own_tokenizer(tmp_path):
    """A real tiny model behind the rollout contract: its replies are noise, so every sample fails and none scores 0."""
    import sys
    from pathlib import Path
    sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
    import numpy as np
    import torch
    from tiny_models import build
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from verl.core.types import Finish, Sample
    from verl.rewards.judge import EngineClient, Judge

    path = build("llama-base", tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)

    class Engine:
        def generate(self, requests, sampling):
            out = []
            for r in requests:
                ids = torch.tensor(r.prompt_ids[None].astype(np.int64))
                new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=sampling.max_tokens,
                                     do_sample=False)[0, ids.shape[1]:].numpy().astype(np.int32)
                out.append([Sample(new, np.zeros(len(new)), np.zeros(len(new)), Finish.LENGTH, 0)])
            return out

    client = EngineClient(Engine(), tokenizer, max_tokens=4)
    replies = client.answer(["rate this", "and this"])
    assert len(replies) == 2 and all(isinstance(r, str) and r for r in replies)
    with pytest.raises(RewardError, match="(?s)'tiny' failed on 1 of 1.*no complete number after 'Score:'"):
        Scorer(build_rewards(Judge("tiny", JudgeSettings(url=""), client))).score([group(["x"])])


def test_scores_from_a_column(tmp_path):
    a, b = group(["x", "y"], rated=4), group(["x"], id="u", rated=None)
    scores, _ = run({"human": "rated"}, a, b)
    assert scores == [4.0, 4.0, None]
    with pytest.raises(DataError, match="column 'rated' of task 't'.*'good' of type str"):
        build_rewards([{"human": "rated"}]).check([group(["x"], rated="good").task])


def test_a_feed_that_grows_while_the_run_goes_on(tmp_path, capsys):
    feed = tmp_path / "feed.jsonl"
    rewards = build_rewards([{"human": "feed.jsonl"}], base_dir=tmp_path)
    rewards.check([])
    scorer = Scorer(rewards)

    def scores():
        g = group(["x", "y"], id="t1")
        metrics = scorer.score([g])
        return [s.score for s in g.samples], metrics

    g = group(["x"], id="t1")
    scorer.score([g])
    assert g.samples[0].rewards["human"] == Abstained()  # no file yet: nobody has scored
    feed.write_bytes(b'\xef\xbb\xbf{"id": "t1", "completion": "x", "score": 2}\r\n\r\n{"id": "t1", "sco')
    assert scores()[0] == [2.0, None]  # half a line is still being written
    with feed.open("ab") as file:
        file.write(b're": 1}\n{"id": "t1", "score": "good"}\nnonsense\n')
    got, metrics = scores()
    assert got == [2.0, 1.0] and metrics["rewards/human/bad_lines"] == 2
    assert "feed.jsonl:4: the score returned 'good'" in capsys.readouterr().err
    with feed.open("ab") as file:
        file.write(b'{"id": "t1", "completion": "x", "score": null}\n{"id": "t1", "score": 5}\n')
    assert scores()[0] == [None, 5.0]
    with pytest.raises(DataError, match="feed.jsonl:4.*2 such lines"):
        build_rewards([{"human": "feed.jsonl"}], base_dir=tmp_path).check([])
