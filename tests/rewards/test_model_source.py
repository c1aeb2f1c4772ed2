"""Reward models as sources: own tokenizer and chat template, wrapping of single-item models, truncation counted."""

import sys
from pathlib import Path

import pytest
import torch
from reward_samples import group
from transformers import AutoModelForSequenceClassification

from verl.core.errors import ConfigError, ModelError, RewardError
from verl.models.reward_model import RewardModel
from verl.rewards import RewardSource, Scorer, build_rewards

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from tiny_models import CHAT, build  # noqa: E402


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build("bert", tmp_path_factory.mktemp("rm") / "judge-bert")


def scores(rewards, *groups):
    Scorer(rewards).score(groups)
    return [s.score for g in groups for s in g.samples]


def test_a_directory_a_reward_model_and_a_classifier_are_the_same_source(directory):
    expected = RewardModel(directory).score(["question good", "question bad"])
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    for source in [directory, RewardSource(model=directory), {"model": Path(directory).name, "batch_size": 1},
                   RewardModel(directory), model]:
        rewards = build_rewards(source, base_dir=Path(directory).parent)
        assert rewards.entries[0].source.name == "judge-bert"
        assert scores(rewards, group([" good", " bad"])) == pytest.approx(expected, abs=1e-5)


def test_conversations_use_the_reward_models_own_template(tmp_path):
    path = build("llama", tmp_path / "rm", chat_template=CHAT)
    model = RewardModel(path)
    prompt = [{"role": "user", "content": "q"}]
    expected = model.score(["<user>q</s><assistant>good</s>"], add_special_tokens=False)
    assert scores(build_rewards(model), group(["good"], prompt=prompt)) == pytest.approx(expected, abs=1e-6)
    model.tokenizer.chat_template = None
    assert scores(build_rewards(model), group(["good"], prompt=prompt)) == pytest.approx(model.score(["q\ngood"]), abs=1e-6)


def test_what_had_to_be_cut_is_counted(directory):
    g = group(["good " * 200, "good"])
    metrics = Scorer(build_rewards(directory)).score([g])
    assert metrics["rewards/judge-bert/truncated_rate"] == 0.5 and metrics["rewards/unscored"] == 0


class OneText(torch.nn.Module):
    def score(self, text):
        return float(len(text.strip()))


class OneRow(torch.nn.Module):
    def score(self, texts):
        (text,) = texts
        return torch.tensor([float(len(text.strip()))])


@pytest.mark.parametrize("single", [OneText, OneRow])
def test_a_model_that_scores_one_item_at_a_time_is_wrapped(single, capsys):
    g = group(["ab", "c"], prompt="")
    assert scores(build_rewards(single()), g) == [2.0, 1.0]
    assert "called one text at a time" in capsys.readouterr().err


def test_a_model_that_fails_on_everything_shows_its_own_error():
    class Broken(torch.nn.Module):
        def score(self, texts):
            raise ZeroDivisionError("inside the model")

    with pytest.raises(RewardError, match="(?s)'Broken' failed on 2 of 2.*ZeroDivisionError: inside the model"):
        scores(build_rewards(Broken()), group(["a", "b"]))


def test_modules_that_cannot_score_and_missing_directories_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="Linear has no method score"):
        build_rewards(torch.nn.Linear(1, 1))
    with pytest.raises(ModelError, match="not a model directory"):
        build_rewards([RewardSource(model=str(tmp_path / "nowhere"))])
    with pytest.raises(ConfigError, match="a reward source is 3 of type int"):
        build_rewards(3)
