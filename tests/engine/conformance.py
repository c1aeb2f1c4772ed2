"""What every rollout engine must do. A test class per engine inherits `Conformance` and says how to build its engine."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine import tiny
from verl.core.batch import from_groups
from verl.core.errors import CapacityError, ConfigError, DataError, WeightsError
from verl.core.types import Finish, Group, Request, Sampling, Task, derive_seed
from verl.core.weights import Weights
from verl.models.load import load_lm
from verl.models.packed import Packed

LIMIT = 96
OFF = -1e4  # a bias that leaves a row no probability
HALF = tuple(range(128))


def requests(lengths, n=1, seed=0):
    rng = np.random.default_rng(seed)
    return [Request(f"r{i}", rng.integers(0, 256, size).astype(np.int32), tuple(derive_seed(seed, i, j) for j in range(n)))
            for i, size in enumerate(lengths)]


def flat(results):
    return [sample for samples in results for sample in samples]


def ids(results):
    return [sample.ids_L.tolist() for sample in flat(results)]


def rescored(lm, asked, results, temperature):
    """Log-probs of every sampled token by the training forward over one packed batch."""
    groups = [Group(Task(r.key, ""), r.prompt_ids, samples) for r, samples in zip(asked, results)]
    with torch.no_grad():
        return lm.forward(Packed(from_groups(groups), lm.device), temperature).logprobs_T.numpy()


def agree(lm, asked, results, temperature):
    error = np.abs(np.concatenate([s.logprobs_L for s in flat(results)]) - rescored(lm, asked, results, temperature))
    assert error.mean() <= 1e-5 and error.max() <= 1e-4, (error.mean(), error.max())


def transformers_greedy(module, asked, count):
    """transformers' own greedy search, one prompt at a time, rows without a token suppressed."""
    out = []
    for request in asked:
        prompt = torch.from_numpy(request.prompt_ids.astype(np.int64))[None]
        got = module.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count,
                              repetition_penalty=1.0, eos_token_id=[-1], pad_token_id=0,
                              suppress_tokens=list(range(tiny.IDS, tiny.ROWS)))
        out.append(got[0, prompt.shape[1]:].tolist())
    return out


class Conformance:
    """`build(lm, path)` returns the engine under test, holding lm's weights; `lm` is what a trainer would train."""

    def build(self, lm, path):
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def path(self, tmp_path_factory):
        return tiny.model_dir(tmp_path_factory.mktemp("model"))

    @pytest.fixture(scope="class")
    def lm(self, path):
        lm = load_lm(path, "float32")
        assert lm.native, lm.why_not
        return lm

    @pytest.fixture(scope="class")
    def engine(self, lm, path):
        engine = self.build(lm, path)
        yield engine
        engine.close()

    @pytest.fixture
    def publish(self, engine, lm):
        """Puts changed parameters in force as a new version; the first weights come back afterwards."""
        kept = {name: p.detach().clone() for name, p in lm.module.named_parameters()}

        def send(change):
            with torch.no_grad():
                change(lm.module)
            version = engine.version + 1
            engine.load_weights(Weights(version, lambda: ((n, p.detach()) for n, p in lm.module.named_parameters()), lm.module))
            return version

        yield send
        send(lambda module: [p.copy_(kept[name]) for name, p in module.named_parameters()])

    # -- the distribution ----------------------------------------------------------------------------------------------

    def test_greedy_is_transformers_greedy(self, engine, path):
        asked = requests([1, 2, 9, 40])
        got = engine.generate(asked, Sampling(temperature=0, max_tokens=16, ignore_eos=True))
        module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        assert ids(got) == transformers_greedy(module, asked, 16)

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_logprobs_are_those_of_the_training_forward(self, engine, lm, temperature):
        asked = requests([1, 5, 17, 60, 3], n=3)
        agree(lm, asked, engine.generate(asked, Sampling(temperature=temperature, max_tokens=24)), temperature)

    def test_d022_logprobs_belong_to_the_tempered_distribution(self, engine, publish):
        publish(lambda module: _fixed(module, {0: 2.0, 1: 1.0, 2: 0.0}))
        found = engine.generate(requests([4], n=16), Sampling(temperature=0.5, max_tokens=8, ignore_eos=True))
        of_one = [float(lp) for s in flat(found) for i, lp in zip(s.ids_L, s.logprobs_L) if i == 1]
        assert of_one and of_one == pytest.approx([-2.142932] * len(of_one), abs=1e-4)

    def test_d030_rows_without_a_token_are_never_sampled_or_counted(self, engine, publish):
        publish(lambda module: _fixed(module, {0: 0.0, 1: 0.0, 2: 0.0, tiny.IDS: 9.0, tiny.IDS + 1: 9.0}))
        found = engine.generate(requests([4], n=125), Sampling(max_tokens=80, ignore_eos=True))
        assert sum(len(s) for s in flat(found)) == 10000 and {i for s in ids(found) for i in s} == {0, 1, 2}
        assert np.allclose(np.concatenate([s.logprobs_L for s in flat(found)]), -1.098612, atol=1e-4)

    def test_d030_prompt_ids_are_held_against_the_rows(self, engine):
        short = Sampling(max_tokens=2)
        with pytest.raises(DataError, match=f"id {tiny.ROWS}"):
            engine.generate([Request("a", np.array([tiny.ROWS], np.int32), (1,))], short)
        with pytest.raises(DataError, match="'b'"):
            engine.generate([Request("b", np.array([3, -1], np.int32), (1,))], short)
        assert len(engine.generate([Request("c", np.array([tiny.ROWS - 1], np.int32), (1,))], short)[0][0]) >= 1

    def test_d073_the_checkpoint_decides_the_end_ids_and_nothing_else(self, engine, lm):
        asked = requests([3, 8], n=24)
        found = engine.generate(asked, Sampling(max_tokens=80))
        agree(lm, asked, found, 1.0)  # temperature 1 and the whole distribution, whatever the file says
        ended = [s for s in flat(found) if s.finish is Finish.STOP]
        assert {int(s.ids_L[-1]) for s in ended} == {s.stop_reason for s in ended} <= {7, 9, 256} and len(ended) >= 5
        assert not any(i in (7, 9, 256) for s in ids(found) for i in s[:-1])
        assert any(len(set(s)) < len(s) for s in ids(found)), "a repetition penalty was at work"

    # -- seeds ---------------------------------------------------------------------------------------------------------

    def test_a_sample_depends_on_its_seed_whatever_the_batch(self, engine):
        asked, sampling = requests([4, 1, 33, 9], n=3), Sampling(max_tokens=20)
        together = engine.generate(asked, sampling)
        assert ids(engine.generate(asked[::-1], sampling)[::-1]) == ids(together)
        alone = [engine.generate([Request(r.key, r.prompt_ids, (seed,))], sampling)[0] for r in asked for seed in r.seeds]
        assert ids(alone) == ids(together)
        assert [s.seed for s in flat(together)] == [seed for r in asked for seed in r.seeds]

    def test_d065_seeds_of_four_engines_give_different_samples_and_repeat(self, engine):
        prompt = requests([6])[0].prompt_ids
        asked = [Request(f"engine {e}", prompt, tuple(derive_seed(42, e, j) for j in range(2))) for e in range(4)]
        sampling = Sampling(max_tokens=32, ignore_eos=True)
        first = ids(engine.generate(asked, sampling))
        assert len({tuple(s) for s in first}) == 8
        assert ids(engine.generate(asked, sampling)) == first

    # -- ends ----------------------------------------------------------------------------------------------------------

    def test_d057_any_of_several_end_ids_finishes_a_sample(self, engine):
        asked = requests([4, 9], n=4)
        free = ids(engine.generate(asked, Sampling(max_tokens=16, ignore_eos=True)))
        ends = (free[0][3], free[5][6])
        found = flat(engine.generate(asked, Sampling(max_tokens=16, stop_ids=ends)))
        for sample, whole in zip(found, free):
            at = next((i for i, token in enumerate(whole) if token in ends), None)
            assert sample.ids_L.tolist() == (whole if at is None else whole[:at + 1])
            assert sample.finish is (Finish.LENGTH if at is None else Finish.STOP) and sample.truncated is (at is None)
            assert sample.stop_reason == (None if at is None else whole[at])
        assert {s.stop_reason for s in found} >= set(ends)

    def test_stop_strings_keep_the_tokens_that_complete_them(self, engine, lm):
        asked = requests([4, 9, 2], n=4)
        free = ids(engine.generate(asked, Sampling(max_tokens=24, ignore_eos=True)))
        plain = [[t if t < 94 else None for t in s] for s in free]  # ids below 94 are printable ASCII
        where, at = next((i, j) for i, s in enumerate(plain) for j in range(2, 23) if None not in s[j:j + 2])
        string = lm.tokenizer.decode(free[where][at:at + 2])
        found = flat(engine.generate(asked, Sampling(max_tokens=24, ignore_eos=True, stop=("never there", string))))
        for sample, whole in zip(found, free):
            end = next((j + 2 for j in range(23) if whole[j:j + 2] == free[where][at:at + 2]), None)
            assert sample.ids_L.tolist() == whole[:end]
            assert (sample.finish, sample.stop_reason) == ((Finish.LENGTH, None) if end is None else (Finish.STOP, string))
        assert found[where].finish is Finish.STOP

    def test_min_and_max_tokens(self, engine):
        found = flat(engine.generate(requests([3, 5], n=16), Sampling(max_tokens=8, min_tokens=4, stop_ids=HALF)))
        for sample in found:
            assert not set(sample.ids_L[:4].tolist()) & set(HALF)
            assert 5 <= len(sample) <= 8 and (sample.finish is Finish.STOP) == (int(sample.ids_L[-1]) in HALF)
        assert {s.finish for s in found} == {Finish.STOP, Finish.LENGTH}

    # -- limits --------------------------------------------------------------------------------------------------------

    def test_every_prompt_length_up_to_the_limit(self, engine, lm):
        assert engine.max_total_tokens == LIMIT
        asked = requests([*range(1, 12), LIMIT - 3])
        results = engine.generate(asked, Sampling(max_tokens=3, ignore_eos=True))
        assert [len(s) for s in flat(results)] == [3] * len(asked)
        agree(lm, asked, results, 1.0)

    def test_what_cannot_run_is_refused_before_anything_runs(self, engine):
        seen = []
        for prompt, sampling, error, words in [
                (np.arange(LIMIT - 3), Sampling(max_tokens=4), CapacityError, f"{LIMIT - 3}.*{LIMIT}.*max_total_tokens"),
                (np.arange(0), Sampling(max_tokens=4), DataError, "empty"),
                (np.arange(3), Sampling(max_tokens=0), ConfigError, "max_tokens"),
                (np.arange(3), Sampling(max_tokens=4, min_tokens=5), ConfigError, "min_tokens")]:
            with pytest.raises(error, match=words):
                engine.generate([*requests([3]), Request("x", prompt.astype(np.int32), (1,))], sampling,
                                on_sample=lambda *a: seen.append(a))
        assert not seen

    # -- reporting -----------------------------------------------------------------------------------------------------

    def test_every_sample_is_reported_once_as_it_finishes(self, engine):
        asked, seen = requests([3, 7], n=5), {}
        results = engine.generate(asked, Sampling(max_tokens=12, stop_ids=HALF),
                                  on_sample=lambda key, index, sample: seen.setdefault((key, index), []).append(sample))
        assert seen == {(r.key, j): [results[i][j]] for i, r in enumerate(asked) for j in range(5)}

    def test_cancelling_ends_the_rest_as_aborted(self, engine):
        asked, seen = requests([3, 7, 5], n=6), []
        results = engine.generate(asked, Sampling(max_tokens=80, stop_ids=HALF[:8]), on_sample=lambda *a: seen.append(a),
                                  cancelled=lambda: bool(seen))
        finished = [s.finish for s in flat(results)]
        assert Finish.ABORT in finished and Finish.STOP in finished and len(seen) == 18
        assert not any(s.truncated for s in flat(results) if s.finish is Finish.ABORT)
        before = flat(engine.generate(asked, Sampling(max_tokens=8), cancelled=lambda: True))
        assert {s.finish for s in before} == {Finish.ABORT}
        after = flat(engine.generate(asked, Sampling(max_tokens=8, ignore_eos=True)))
        assert [len(s) for s in after] == [8] * 18

    def test_an_error_while_scoring_leaves_the_engine_usable(self, engine):
        asked, sampling = requests([3, 7], n=3), Sampling(max_tokens=12, stop_ids=HALF)
        want = ids(engine.generate(asked, sampling))

        def broken(*_):
            raise ZeroDivisionError("a reward function broke")

        with pytest.raises(ZeroDivisionError):
            engine.generate(asked, sampling, on_sample=broken)
        assert ids(engine.generate(asked, sampling)) == want

    # -- weights -------------------------------------------------------------------------------------------------------

    def test_new_weights_are_in_force_for_the_next_token_and_old_keys_are_never_read(self, engine, lm, publish):
        asked, greedy = requests([50, 20]), Sampling(temperature=0, max_tokens=12, ignore_eos=True)
        old = engine.generate(asked, greedy)
        assert {int(v) for s in flat(old) for v in s.versions_L} == {engine.version}
        # only keys and values change: a cache of the old ones would be the only way to miss it
        version = publish(lambda module: [p.mul_(-1.5) for n, p in module.named_parameters() if "k_proj.w" in n or "v_proj.w" in n])
        new = engine.generate(asked, greedy)
        assert engine.version == version and {int(v) for s in flat(new) for v in s.versions_L} == {version}
        assert ids(new) != ids(old)
        agree(lm, asked, new, 1.0)

    def test_older_weights_are_refused(self, engine, lm, publish):
        publish(lambda module: None)
        stale = Weights(engine.version - 1, lambda: ((n, p.detach()) for n, p in lm.module.named_parameters()), lm.module)
        with pytest.raises(WeightsError, match="version"):
            engine.load_weights(stale)

    def test_sleep_and_wake_change_nothing(self, engine):
        asked, sampling = requests([5, 30], n=2), Sampling(max_tokens=10)
        want = ids(engine.generate(asked, sampling))
        engine.sleep()
        engine.sleep()
        engine.wake()
        engine.wake()
        assert ids(engine.generate(asked, sampling)) == want


def _fixed(module, logits):
    """Make every distribution the softmax of these logits by id: each token embeds as ones and passes the layers unchanged."""
    for name, parameter in module.named_parameters():
        if "embed_tokens" in name or "norm" in name:
            parameter.fill_(1)
        elif "o_proj" in name or "down_proj" in name or "lm_head" in name:
            parameter.zero_()
    head = module.get_output_embeddings().weight
    head[:, 0] = OFF
    for token, value in logits.items():
        head[token, 0] = value
