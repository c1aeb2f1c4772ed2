"""Checkpoints are whole or absent (field cases D005, D027, D041)."""

import ctypes
import json
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from verl.checkpoint import Draft, load, newest, save
from verl.core.errors import CheckpointError

WEIGHTS = {"policy": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}}


def names(root):
    return sorted(p.name for p in root.iterdir())


def quiet(line):
    pytest.fail(f"nothing should be skipped: {line}")


@pytest.mark.parametrize("mmap", [True, False])
def test_what_is_saved_is_what_is_loaded(tmp_path, mmap):
    tensors = {"a": {f"t{i}": (torch.randn(3, 2) * 3).to(dtype) for i, dtype in enumerate([
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool,
        torch.float8_e4m3fn])}}
    tensors["a"] |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "strided": torch.arange(12.).view(3, 4).T}
    tensors["tied"] = {"x": tensors["a"]["t0"], "y": tensors["a"]["t0"]}
    state = {"step": 7, "lr": 1e-6, "best": float("-inf"), "list": [1, "é", None], "moments": {0: torch.ones(2)}}
    saved = save(tmp_path, 7, tensors, state)
    back = load(saved.path, mmap=mmap)
    assert back.step == 7 and back.tensors.keys() == tensors.keys()
    for file, named in tensors.items():
        for name, tensor in named.items():
            got = back.tensors[file][name]
            assert got.dtype == tensor.dtype and got.shape == tensor.shape
            assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8))
    assert torch.equal(back.state.pop("moments")[0], state.pop("moments")[0]) and back.state == state
    assert names(tmp_path) == ["step_7"]


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path):
    saved = save(tmp_path, 1, WEIGHTS, {"x": torch.ones(1)})
    assert names(saved.path) == ["manifest.json", "policy.safetensors", "state.json", "state.safetensors"]


def test_d005_bad_weights_are_refused_and_rotate_nothing_out(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step, WEIGHTS, keep_last=3)
    bad = {"policy": {"w": torch.tensor([1.0, float("nan")])}}
    for step in (400, 500, 600):
        with pytest.raises(CheckpointError, match=f"step {step}: policy: w holds NaN or infinity; nothing was saved"):
            save(tmp_path, step, bad, keep_last=3)
    assert names(tmp_path) == ["step_100", "step_200", "step_300"]
    assert newest(tmp_path, quiet).step == 300


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_infinity_is_found_in_every_float_type(tmp_path, dtype):
    with pytest.raises(CheckpointError, match="holds NaN or infinity"):
        save(tmp_path, 1, {"p": {"w": torch.tensor([1.0, float("inf")]).to(dtype)}})


def test_retention_does_not_count_broken_checkpoints(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, WEIGHTS)
    (tmp_path / "step_3" / "policy.safetensors").unlink()
    save(tmp_path, 4, WEIGHTS, keep_last=2)
    assert names(tmp_path) == ["step_2", "step_3", "step_4"]


def renamed(root, old, new):
    """As if `new` had been the name it was saved under."""
    manifest = json.loads((root / old / "manifest.json").read_text())
    (root / old / "manifest.json").write_text(json.dumps(manifest | {"name": new}))
    (root / old).rename(root / new)


def test_d041_steps_are_numbers_and_only_own_directories_are_deleted(tmp_path):
    source, root = tmp_path / "source", tmp_path / "run"
    for step in (2500, 900, 500):
        save(source, step, WEIGHTS)
    renamed(source, "step_900", "step_0900")
    (source / "best").mkdir()
    (source / "best" / "model.txt").write_text("mine")
    shutil.copytree(source / "step_2500", source / "step_2500.bak")
    root.mkdir()
    for name in ("best", "step_0900", "step_2500", "step_2500.bak", "step_500"):  # step_500 is the newest on disk
        shutil.copytree(source / name, root / name)
    save(root, 10000, WEIGHTS, keep_last=2)
    assert names(root) == ["best", "step_10000", "step_2500", "step_2500.bak"]
    assert newest(root, quiet).step == 10000


def test_d041_newest_is_by_number(tmp_path):
    for step in (10000, 2500, 500):
        save(tmp_path, step, WEIGHTS)
    os.utime(tmp_path / "step_500")
    assert newest(tmp_path, quiet).path.name == "step_10000"


def test_the_same_step_can_be_saved_again(tmp_path):
    save(tmp_path, 5, WEIGHTS, {"n": 1})
    save(tmp_path, 5, WEIGHTS, {"n": 2})
    save(tmp_path, 5, WEIGHTS, {"n": 3})
    assert len(names(tmp_path)) == 1 and newest(tmp_path, quiet).state() == {"n": 3}


def test_saving_an_earlier_step_keeps_what_was_just_saved(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step, WEIGHTS)
    save(tmp_path, 150, WEIGHTS, keep_last=2)
    assert "step_150" in names(tmp_path)


def test_newest_skips_broken_ones_and_says_which(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step, WEIGHTS)
    data = bytearray((tmp_path / "step_5" / "policy.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "step_5" / "policy.safetensors").write_bytes(data)
    (tmp_path / "step_4" / "state.json").write_text("")
    (tmp_path / "step_3" / "manifest.json").write_text('{"step": 3')
    (tmp_path / "step_2" / "manifest.json").unlink()
    said = []
    assert newest(tmp_path, said.append).step == 1
    text = "\n".join(said)
    assert len(said) == 4 and "step_5: the content of policy.safetensors is not what was saved" in text
    assert "step_4: state.json has 0 bytes instead of" in text and "step_3: manifest.json cannot be read" in text
    assert "step_2: no manifest.json" in text
    with pytest.raises(CheckpointError, match="checksum"):
        load(tmp_path / "step_5")


def test_no_checkpoint_is_none(tmp_path):
    assert newest(tmp_path / "nowhere", quiet) is None and newest(tmp_path, quiet) is None


def test_a_manifest_cannot_point_outside(tmp_path):
    saved = save(tmp_path, 1, WEIGHTS)
    manifest = json.loads((saved.path / "manifest.json").read_text())
    manifest["files"]["../../secret"] = {"bytes": 1, "crc32": 1}
    (saved.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="is not a verl-checkpoint-1 manifest"):
        load(saved.path)
    with pytest.raises(CheckpointError, match="not a plain file name"):
        save(tmp_path, 2, {"../x": {}})
    assert names(tmp_path) == ["step_1"]


def test_ranks_write_their_own_files(tmp_path):
    leader = Draft(tmp_path, 3)
    follower = Draft(tmp_path, 3, leader=False)
    entry = follower.write("optimizer_rank1", {"m": torch.ones(2)})
    leader.write("optimizer_rank0", {"m": torch.zeros(2)})
    assert newest(tmp_path, quiet) is None
    leader.commit({"world": 2}, others=entry)
    assert set(load(newest(tmp_path, quiet)).tensors) == {"optimizer_rank0", "optimizer_rank1"}


def test_state_that_is_no_data_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"state.sampler.0: a function cannot be stored"):
        save(tmp_path, 1, WEIGHTS, {"sampler": [lambda: 0]})
    assert names(tmp_path) == []


def test_keep_last_zero_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="keep_last: 0 would delete the checkpoint just saved"):
        save(tmp_path, 1, WEIGHTS, keep_last=0)


def test_d027_optimizer_state_survives_to_the_last_bit(tmp_path):
    def make(value):
        p = torch.nn.Parameter(torch.tensor([value]))
        return p, torch.optim.AdamW([p], lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0)

    def update(p, optimizer, grad):
        p.grad = torch.tensor([grad])
        optimizer.step()

    p, optimizer = make(1.0)
    update(p, optimizer, 1.0)
    assert abs(p.item() - 0.9) < 1e-5
    save(tmp_path, 1, {"policy": {"p": p}}, {"optimizer": optimizer.state_dict()})
    back = load(newest(tmp_path, quiet))
    q, resumed = make(back.tensors["policy"]["p"].item())
    resumed.load_state_dict(back.state["optimizer"])
    update(p, optimizer, 2.0)
    update(q, resumed, 2.0)
    assert abs(q.item() - 0.803482) < 1e-5 and q.item() == p.item()


# ------------------------------------------------------------------------------------------- real kills, real full disks
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path, child):
    generator = torch.Generator().manual_seed(0)

    def write(say, root):
        for step in range(1, 100_000):
            save(root, step, {"policy": {"w": torch.full((500_000,), float(step))}}, {"step": step}, keep_last=2)
            say(step)

    for round_ in range(12):
        root = tmp_path / str(round_)
        writer = child(lambda say, root=root: write(say, root))
        done = [int(writer.lines.readline()) for _ in range(2)][-1]
        time.sleep(0.05 * torch.rand((), generator=generator).item())
        status, rest = writer.kill()
        assert status == -signal.SIGKILL
        done = int(rest[-1]) if rest else done
        found = newest(root, quiet)
        assert found.step in (done, done + 1), "at most the save in flight is missing"
        back = load(found)
        assert back.state["step"] == back.step and (back.tensors["policy"]["w"] == back.step).all()
        save(root, 10_000, WEIGHTS, keep_last=1)
        assert names(root) == ["step_10000"], "the next save clears what the kill left"


def test_a_file_size_limit_leaves_the_old_checkpoint(tmp_path, child):
    def write(say):
        save(tmp_path, 1, {"p": {"w": torch.ones(1000)}}, keep_last=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        save(tmp_path, 2, {"p": {"w": torch.ones(100_000)}}, keep_last=1)

    status, (message,) = child(write).wait()
    assert status == 1 and "CheckpointError: step 2 could not be saved" in message and "free space" in message
    assert names(tmp_path) == ["step_1"] and newest(tmp_path, quiet).step == 1


def small_disk(path):
    """Put a tmpfs of 2 MB at `path` for this process alone; False where the kernel does not let us."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(0x10000000 | 0x00020000):  # a user namespace to be allowed to, a mount namespace to be alone
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    return libc.mount(b"none", str(path).encode(), b"tmpfs", 0, b"size=2m") == 0


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, child):
    def write(say):
        if not small_disk(tmp_path):
            return
        save(tmp_path, 1, {"p": {"w": torch.ones(100_000)}})
        try:
            save(tmp_path, 2, {"p": {"w": torch.ones(900_000)}})
        except CheckpointError as error:
            say(error)
        say(f"{names(tmp_path)} {newest(tmp_path, quiet).step}")

    status, lines = child(write).wait()
    if status == 0 and not lines:
        pytest.skip("this kernel lets no process mount a tmpfs of its own")
    message, state = lines
    assert "No space left on device; older checkpoints are untouched; free space" in message
    assert state == "['step_1'] 1"
