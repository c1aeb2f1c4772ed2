"""The shape of the code: imports go down the floors, files and functions stay small, text speaks of the software alone."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "verl"
FLOORS = {"core": 0, "flow": 1, "algorithms": 2, "data": 2, "models": 3, "engine": 4, "checkpoint": 4, "rewards": 5,
          "trainer": 6, "cli": 7, "utils": 7}
FILE_LINES, FUNCTION_LINES = 400, 60
LONG_FILES: dict[str, str] = {}  # file -> why it is longer
EXECUTES = {"verl/rewards/sandbox_child.py": "runs a candidate's program: the isolated child exists for that"}
LONG_FUNCTIONS: dict[str, str] = {}  # "file:function" -> why it is longer
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text("utf-8")) for path in FILES}


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path, tree: ast.Module):
    """(line, dotted module) of every import in a file, those inside functions included."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[:len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield node.lineno, module
            if module == "verl":  # `from verl import data`
                yield from ((node.lineno, f"verl.{alias.name}") for alias in node.names)


def upward(path: Path, tree: ast.Module) -> list[str]:
    """Imports of a file that do not go strictly down."""
    own = path.relative_to(PACKAGE).parts[0]
    found = []
    for line, module in imported(path, tree):
        parts = module.split(".")
        if parts[0] != "verl" or len(parts) < 2 or parts[1] == own or parts[1] not in FLOORS:
            continue
        if FLOORS[parts[1]] >= FLOORS[own] and not (own == "cli" and parts[1] == "utils"):
            found.append(f"{short(path)}:{line} imports {module}: {own} is floor {FLOORS[own]}, {parts[1]} is floor "
                         f"{FLOORS[parts[1]]}")
    return found


def test_every_package_has_a_floor():
    packages = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert packages == set(FLOORS)
    assert [p.name for p in PACKAGE.glob("*.py")] == ["__init__.py"], "modules live in packages"


def test_imports_go_down_and_never_sideways():
    found = [line for path, tree in TREES.items() if path.parent != PACKAGE for line in upward(path, tree)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("file, code, bad", [
    ("core/x.py", "import verl.data.rows", True), ("data/x.py", "from verl.algorithms import kl", True),
    ("data/x.py", "def f():\n    from verl import trainer", True), ("data/x.py", "from verl.core import batch", False),
    ("engine/native/x.py", "from ...checkpoint import save", True), ("engine/native/x.py", "from ..base import X", False),
    ("core/x.py", "T = {'a': 'verl.trainer.rl:Loop'}", False), ("data/x.py", "import verl", False)])
def test_the_check_sees_imports_that_go_up(file, code, bad):
    assert bool(upward(PACKAGE / file, ast.parse(code))) is bad


def test_importing_verl_imports_nothing_of_its_own():
    """Names of the package resolve lazily, so that `import verl` needs no optional package."""
    tree = TREES[PACKAGE / "__init__.py"]
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert all(name.split(".")[0] in ("importlib", "typing", "__future__") for node in top
               for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]))


def test_files_hold_one_idea():
    counts = {short(p): len(p.read_text("utf-8").splitlines()) for p in FILES}
    long = [f"{name}: {n} lines, allowed {FILE_LINES}" for name, n in counts.items()
            if n > FILE_LINES and name not in LONG_FILES]
    assert not long, "\n".join(long)
    assert not [name for name in LONG_FILES if counts.get(name, 0) <= FILE_LINES], "an exception nobody needs"


def functions():
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{short(path)}:{node.name}", node.end_lineno - node.lineno + 1


def test_functions_do_one_thing():
    counts = dict(functions())
    long = [f"{name}: {n} lines, allowed {FUNCTION_LINES}" for name, n in functions()
            if n > FUNCTION_LINES and name not in LONG_FUNCTIONS]
    assert not long, "\n".join(long)
    assert not [name for name in LONG_FUNCTIONS if counts.get(name, 0) <= FUNCTION_LINES], "an exception nobody needs"


def test_no_other_utils():
    found = [short(p) for p in PACKAGE.rglob("*") if re.search(r"(^|_)(util|helper|misc|common)s?(_|$)", p.stem)
             and "__pycache__" not in p.parts]
    assert set(found) <= {"verl/utils"}, f"a helper lives with its only user, or has a name: {found}"
    assert {p.name for p in (PACKAGE / "utils").glob("*.py")} <= {"__init__.py", "config.py"}


def test_nothing_unfinished_is_left():
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = [f"{short(p)}:{i}: {line.strip()}" for p in FILES for i, line in enumerate(p.read_text("utf-8").split("\n"), 1)
             if words.search(line)]
    assert not found, "\n".join(found)


def test_nothing_is_unpickled_or_evaluated():
    """Model output, checkpoints and configs never reach pickle or eval; yaml only through loaders that build no objects."""
    calls = {"eval", "exec", "pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
             "torch.load", "os.system", "os.popen"}
    found = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in calls:
                safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
                if not safe and short(path) not in EXECUTES:
                    found.append(f"{short(path)}:{node.lineno}: {ast.unparse(node.func)}")
    assert not found, "\n".join(found)


def texts():
    """Every text file that ships: code, tests, docs, examples, configs."""
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if path.suffix in (".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".txt", ".cfg") and path.is_file() and not any(
                part.startswith(".") or part.endswith(".egg-info") or part in ("__pycache__", "build", "dist", "runs")
                for part in parts):
            yield path


def test_text_speaks_of_the_software_alone():
    """No path of the place where it was written, no word on how the work was organised."""
    words = re.compile("|".join([r"(?<![\w.])/" + r"work/", r"\bshared" + r"/(?:spec|cases|seeds|data)", r"brief" + r"\.md",
                                 r"\bsub-?" + r"agents?\b", r"\bthis " + r"session\b", r"/tmp/" + r"venv"]), re.I)
    found = [f"{short(p)}:{i}: {line.strip():.100}" for p in texts()
             for i, line in enumerate(p.read_text("utf-8").split("\n"), 1) if words.search(line)]
    assert not found, "\n".join(found)
