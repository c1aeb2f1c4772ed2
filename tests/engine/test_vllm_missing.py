"""What holds of vLLMEngine whether vLLM is installed or not."""

import subprocess
import sys

import numpy as np
import pytest

from verl.core.errors import ConfigError
from verl.core.types import Request, Sampling
from verl.engine import ROLLOUTS
from verl.engine.vllm_engine import vllm_available, vLLMEngine


def test_importing_the_engine_imports_no_vllm():
    code = "import sys, verl.engine.vllm_engine; print([m for m in sys.modules if m.split('.')[0] == 'vllm'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    assert ROLLOUTS["vllm"] is vLLMEngine


def test_without_vllm_the_engine_remembers_what_was_asked_and_says_what_happens(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)  # Python's own way to make an import fail
    usable, reason = vllm_available()
    assert not usable and "the package vllm is not installed" in reason
    engine = vLLMEngine(model_name="some/model", tensor_parallel_size=2, dtype="bfloat16", max_num_batched_tokens=4096,
                        gpu_memory_utilization=0.8)
    (line,) = capsys.readouterr().out.splitlines()
    assert "falling back to the built-in rollout engine" in line and "pip install vllm" in line
    assert not engine.available
    assert (engine.model_name, engine.tensor_parallel_size, engine.dtype) == ("some/model", 2, "bfloat16")
    assert (engine.max_num_batched_tokens, engine.gpu_memory_utilization) == (4096, 0.8)
    with pytest.raises(ConfigError, match="trainer.rollout.engine: native"):
        engine.generate([Request("a", np.array([1], np.int32), (1,))], Sampling())
    engine.sleep()
    engine.close()


@pytest.mark.parametrize("version, usable", [("0.23.9", False), ("0.24.0", True), ("0.32.0+cpu", True), ("0.33.0", False)])
def test_the_range_of_versions_is_checked(monkeypatch, tmp_path, version, usable):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    info = tmp_path / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found, reason = vllm_available()
    assert found is usable and version in reason
    assert usable or "0.24 or newer, older than 0.33" in reason


def test_a_sleep_level_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="sleep_level is 3"):
        vLLMEngine("some/model", sleep_level=3)
