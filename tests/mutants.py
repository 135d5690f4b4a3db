"""Changes core modules in a copy of the checkout, one thing at a time, and prints the changes that no test notices.

Started by `.ci/mutants`, in an environment with cosmic-ray, which makes the changes: `mutants.py COPY PYTHON COUNT SEED`.
"""

from __future__ import annotations

import difflib
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

CORE = {
    "jupyter_distrib/kernel/analysis/failures.py": "tests/kernel/record/test_failures.py tests/kernel/views/test_text.py",
    "jupyter_distrib/kernel/analysis/shares.py": "tests/kernel/record/test_shares.py",
    "jupyter_distrib/kernel/record/record.py": "tests/kernel/record tests/kernel/views",
    "jupyter_distrib/kernel/session/pools/next_rank.py": "tests/kernel/session/test_next_rank.py",
    "jupyter_distrib/kernel/session/pools/selection.py": "tests/kernel/session/test_selection.py",
    "jupyter_distrib/pools/ray/placement_plan.py": "tests/pools/ray/test_placement_plan.py",
    "jupyter_distrib/server/diagnose.py": "tests/server/test_diagnose.py",
    "jupyter_distrib/server/group_health.py": "tests/server/test_group_health.py",
    "jupyter_distrib/server/restart_policy.py": "tests/server/test_restart_policy.py",
}
"""Each module, with the tests that are to notice a change in it."""
NO_CHANGES = re.compile(r"VariableReplacer|VariableInserter|RemoveDecorator|_Is(Not)?_(Eq|Lt|Gt)|_(Eq|NotEq)_Is|BitOr_")
"""Operators of cosmic-ray whose results mean the same, or are no Python that anybody would write: `int + None`."""


def main() -> int:
    copy, python, count, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    choice = random.Random(seed)
    if not passes(copy, python, " ".join(CORE.values()), limit_s=300):
        print("The tests fail without a change.")
        return 1
    survivors = 0
    for _ in range(count):
        module = choice.choice([*CORE])
        path = copy / module
        before = path.read_text("utf-8")
        operator, occurrence = choice.choice(mutations(path, before))
        after = mutate_code(before, cosmic_ray.plugins.get_operator(operator)(), occurrence)
        path.write_text(after, "utf-8")
        if passes(copy, python, CORE[module]):
            survivors += 1
            print(
                *difflib.unified_diff(before.splitlines(), after.splitlines(), module, module, "", "", 1, ""), sep="\n"
            )
        path.write_text(before, "utf-8")
    print(f"{count} changes (seed {seed}), of which no test has noticed {survivors}")
    return 0


def mutations(path: Path, source: str) -> list[tuple[str, int]]:
    """All operators that change this source, and the number of the place."""
    nodes = list(ast_nodes(get_ast(source)))
    found = []
    for name in cosmic_ray.plugins.operator_names():
        if not NO_CHANGES.search(name):
            operator = cosmic_ray.plugins.get_operator(name)()
            places = sum(len(list(operator.mutation_positions(node))) for node in nodes)
            found += [(name, place) for place in range(places)]
    assert found, path
    return found


def passes(copy: Path, python: str, tests: str, limit_s: float = 60) -> bool:
    words = [python, "-m", "pytest", "-n", "0", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests.split()]
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return (
            subprocess.run(words, cwd=copy, env=env, timeout=limit_s, capture_output=True, check=False).returncode == 0
        )
    except subprocess.TimeoutExpired:
        return False


if __name__ == "__main__":
    sys.exit(main())
