"""The GPU's output layer against the exact one, its kernels run by Triton's interpreter on the CPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed here (a GPU environment has it)")

CHECK = '''
import torch
from verl.models.head import HeadSpec, _TokenLogprobs
from verl.models.head_fused import FusedTokenLogprobs
torch.manual_seed(0)
for spec, temperature, with_entropy in [(HeadSpec(70), 1.0, False), (HeadSpec(64, 0.5), 0.7, True),
                                        (HeadSpec(70, 1.0, 3.0), 1.3, True), (HeadSpec(61, 2.0, 4.0), 1.0, False)]:
    hidden, weight, bias = torch.randn(9, 16), torch.randn(70, 16), torch.randn(70)
    targets = torch.randint(0, spec.rows, (9,))
    a, b = torch.randn(9), torch.randn(9)
    results = []
    for function in (_TokenLogprobs, FusedTokenLogprobs):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        logprobs, entropy = function.apply(*leaves, targets, spec, temperature, 4)
        total = (logprobs * a).sum() + ((entropy * b).sum() if with_entropy else 0)
        results.append([logprobs, entropy, *torch.autograd.grad(total, leaves)])
    for name, want, got in zip(("logprobs", "entropy", "d hidden", "d weight", "d bias"), *results):
        error = float((want - got).abs().max() / want.abs().max())
        assert error < 2e-6, (spec, name, error)
print("agree")
'''


def test_fused_equals_exact_for_every_head():
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=280,
                          env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert done.stdout == "agree\n", done.stdout + done.stderr
