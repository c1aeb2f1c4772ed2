"""What a loader builds from a config, and what binding a tokenizer checks."""

import json

import pytest
from byte_tokenizers import TEMPLATE, byte_tokenizer

from verl.core.config import load
from verl.core.errors import ConfigError, DataError
from verl.data import DataConfig, PromptDataset, RewardDataset, RLDataLoader

USER = {"role": "user", "content": "alpha"}


def prompts(path, *texts, **columns):
    path.write_text("".join(json.dumps({"prompt": text, **columns}) + "\n" for text in texts))
    return str(path)


def test_datasets_are_built_from_the_config(tmp_path):
    config = DataConfig(train=prompts(tmp_path / "a.jsonl", "p", "q", answer=9007199254740993),
                        eval=prompts(tmp_path / "b.jsonl", "r"))
    run = RLDataLoader(config)
    assert isinstance(run.prompts, PromptDataset) and isinstance(run.rewards, RewardDataset)
    assert run.rewards["a-1"] == {"answer": 9007199254740993} and len(run.rewards) == len(run) == 2
    assert [task.prompt for task in run.eval_prompts] == ["r"]
    assert run.bind(byte_tokenizer(), seed=5) == ["data: 2 prompts", "data: 1 evaluation prompts"]
    assert run.seed == run.state()["seed"] == 5


def test_columns_that_rewards_need(tmp_path):
    run = RLDataLoader([{"prompt": "p", "answer": "1"}, {"prompt": "q"}])
    run.rewards.require([], "accuracy")
    with pytest.raises(DataError, match="accuracy needs column 'answer', which task rows-1 does not have; it has none"):
        run.rewards.require(["answer"], "accuracy")
    with pytest.raises(DataError, match="'anser', which task rows-0 .* did you mean 'answer'.*data.columns"):
        run.rewards.require(["anser"], "accuracy")


def test_paths_of_a_config_file_start_where_it_stands(tmp_path, monkeypatch):
    """Files, globs, mixtures and templates; a template may also be text. Overrides start at the working directory."""
    (tmp_path / "run").mkdir()
    prompts(tmp_path / "run" / "a.jsonl", "p", "q")
    (tmp_path / "run" / "chat.jinja").write_text("x")
    config = tmp_path / "run" / "data.yaml"
    for train, rows in (("a.jsonl", 2), ("'*.jsonl'", 2), ("[a.jsonl, ./a.jsonl]", 4), ("{a.jsonl: 1}", 2)):
        config.write_text(f"train: {train}\nchat_template: chat.jinja\noverlong: drop\nmax_prompt_tokens: 9\n")
        made = load(DataConfig, config).config
        assert len(RLDataLoader(made)) == rows and made.overlong == "drop"
        assert made.chat_template == str(tmp_path / "run" / "chat.jinja")
    text = "{{ messages[0]['content'] }}" + "-" * 300
    assert load(DataConfig, data={"chat_template": text}).config.chat_template == text
    monkeypatch.chdir(tmp_path / "run")
    assert len(RLDataLoader(load(DataConfig, overrides=["train=a.jsonl"]).config)) == 2


def bound(overlong, *texts, bos=False):
    run = RLDataLoader([{"prompt": text} for text in texts],
                       config=DataConfig(max_prompt_tokens=8, overlong=overlong))
    return run, run.bind(byte_tokenizer(bos=bos), seed=0)


def test_over_long_prompts_are_an_error_dropped_or_cut():
    """Field case D032."""
    short, long = "x" * 5, "y" * 12
    with pytest.raises(DataError, match=r"data.max_prompt_tokens: 1 of 2 .* \(row 1\): 12 > 8 tokens.*data.overlong"):
        bound("error", short, long)
    run, lines = bound("drop", short, long)
    assert len(run) == 1 and {task.prompt for task in run.take(5)} == {short}
    assert lines == ["data: 1 prompts, 1 dropped, longer than 8 tokens (first: task rows-1 (row 1): 12 > 8 tokens)"]
    run, lines = bound("truncate_left", short, long)
    assert len(run) == 2 and "1 cut on the left" in lines[0]
    with pytest.raises(DataError, match="no rows left, all 2 were dropped"):
        bound("drop", long, long)
    assert len(bound("drop", "x" * 8)[0]) == 1
    with pytest.raises(DataError, match="no rows left"):
        bound("drop", "x" * 8, bos=True)  # BOS counts


def test_a_source_of_a_mixture_that_drops_away_is_an_error(tmp_path):
    train = {prompts(tmp_path / "a.jsonl", "x"): 1, prompts(tmp_path / "b.jsonl", "y" * 20): 1}
    run = RLDataLoader(DataConfig(train=train, max_prompt_tokens=8, overlong="drop"))
    with pytest.raises(DataError, match="b.jsonl: no rows left, all 1 were dropped"):
        run.bind(byte_tokenizer(), seed=0)


def test_a_resume_after_dropped_prompts():
    texts = ["x" * (3 + i % 9) for i in range(30)]
    first, _ = bound("drop", *texts)
    first.take(7)
    again, _ = bound("drop", *texts)
    again.load_state(first.state())
    assert [task.id for task in again.take(9)] == [task.id for task in first.take(9)]


def test_rows_that_cannot_be_encoded_are_found_when_bound():
    refusing = ("{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
                "{{ m.content }}{% endfor %}")
    rows = [{"prompt": [USER]}, {"prompt": [USER, {"role": "tool", "content": "5"}]}]
    with pytest.raises(DataError, match="task rows-1: .* cannot render roles .*no tools"):
        RLDataLoader(rows).bind(byte_tokenizer(template=refusing), seed=0)
    with pytest.raises(DataError, match="task rows-0: the prompt .* has no tokens"):
        RLDataLoader([{"prompt": [{"role": "user", "content": " "}]}],
                     config=DataConfig(chat_template="{{ messages[0].content | trim }}")).bind(byte_tokenizer(), seed=0)
    hiding = TEMPLATE.replace("<|assistant|>{% endif", "<|assistant|>hm{% endif")
    pair = [{"prompt": [USER], "chosen": [{"role": "assistant", "content": "a"}],
             "rejected": [{"role": "assistant", "content": "b"}]}]
    with pytest.raises(DataError, match="task rows-0: .*renders the beginning"):
        RLDataLoader(pair).bind(byte_tokenizer(template=hiding), seed=0)


def test_held_out_prompts(tmp_path):
    path = prompts(tmp_path / "a.jsonl", *(f"p{i % 17}" for i in range(20)))
    runs = [RLDataLoader(DataConfig(train=path, eval_size=5), seed=seed) for seed in (1, 2)]
    held = [[task.id for task in run.eval_prompts] for run in runs]
    assert held[0] == held[1] and len(held[0]) == 5
    assert not {t.prompt for t in runs[0].prompts} & {t.prompt for t in runs[0].eval_prompts}
    dropped = 20 - 5 - len(runs[0].prompts)
    lines = runs[0].bind(byte_tokenizer(), seed=1)
    assert (f"{dropped} training rows dropped" in lines[0]) is bool(dropped)
    with pytest.raises(DataError, match="data.eval_size: 20 of 20 prompts"):
        RLDataLoader(DataConfig(train=path, eval_size=20))


@pytest.mark.parametrize("settings, message", [
    ({"overlong": "dorp"}, "data.overlong: 'dorp' is not known; did you mean 'drop'"),
    ({"template": "jinja"}, "data.template: 'jinja'.*allowed: auto, chat, raw"),
    ({"max_prompt_tokens": 0}, "data.max_prompt_tokens: 0 leaves no prompt"),
    ({"eval_size": -1}, "data.eval_size: -1 is negative"),
    ({"eval_size": 1, "eval": "x.jsonl"}, "are both set; keep one"),
    ({"template": "raw", "system_prompt": "s"}, "data.system_prompt needs a chat"),
    ({"train": {"a.jsonl": 0}}, "the weight of 'a.jsonl' is 0"),
    ({"train": {"a.jsonl": float("nan")}}, "is nan"),
])
def test_settings_that_contradict(settings, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**settings)
