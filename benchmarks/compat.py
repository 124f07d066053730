"""The zoo in environments of its own, with other versions of torch and transformers: ``make compat``.

Each pair of versions gets a virtual environment that holds just the packages whose version was named and reads every
other one, kvpass included, from the environment that runs this. A version that is not named stays the installed one.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import site
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tabulate import tabulate

from kvpass.benchmarks import coverage
from kvpass.models.zoo import ZOO

INSTALLED = "installed"


@dataclasses.dataclass(frozen=True)
class Result:
    """How one environment did: rows that do what the zoo says, rows the version does not have, and the rest."""

    torch: str
    transformers: str
    good: int
    absent: tuple[str, ...]
    bad: tuple[str, ...]


def judge(data: dict) -> Result:
    """Compare outcomes with the zoo: identical where a row has no refusal, refused where it has; words may change."""
    good, absent, bad = 0, [], []
    for outcome in data["rows"]:
        expected = "refused" if ZOO[outcome.row].refused else "identical"
        name = f"{outcome.row}/{outcome.attn}"
        if outcome.status == expected:
            good += 1
        elif outcome.status == "not built":
            absent.append(f"{name}: {outcome.reason}")
        else:
            bad.append(f"{name}: {outcome.status} {outcome.reason}")
    return Result(data["versions"]["torch"], data["versions"]["transformers"], good, tuple(absent), tuple(bad))


def run(torch: str, transformers: str, rows: list[str], directory: Path) -> Result:
    """Make the environment in ``directory``, run the zoo there, and judge it.

    Raises:
        subprocess.CalledProcessError: a version cannot be installed, or the zoo could not be run at all.
    """
    venv.create(directory, with_pip=True, symlinks=True)
    python = directory / "bin" / "python"
    packages = next((directory / "lib").glob("python*/site-packages"))
    lines = "; ".join(f"site.addsitedir({path!r})" for path in site.getsitepackages())
    (packages / "zz_everything_else.pth").write_text(f"import site; {lines}\n")
    named = [f"{name}=={v}" for name, v in (("torch", torch), ("transformers", transformers)) if v != INSTALLED]
    if named:  # pip sees the other environment's packages, so it adds only what they lack
        subprocess.run([python, "-m", "pip", "install", "--quiet", *named], check=True)
    output = directory / "coverage.json"
    command = [python, "-m", "kvpass.benchmarks.coverage", "--no-tried", "--output", output, *rows]
    subprocess.run(command, check=True)
    return judge(coverage.read(output))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", nargs="*", help="rows of the zoo; default: all")
    for name in ("torch", "transformers"):
        parser.add_argument(f"--{name}", action="append", metavar="VERSION", help="may be repeated")
    args = parser.parse_args(argv)
    results = []
    for pair in itertools.product(args.torch or [INSTALLED], args.transformers or [INSTALLED]):
        with tempfile.TemporaryDirectory(prefix="kvpass-compat-") as directory:
            try:
                results.append(run(*pair, args.row, Path(directory)))
            except subprocess.CalledProcessError as error:
                results.append(Result(*pair, 0, (), (f"cannot run: {' '.join(map(str, error.cmd[1:]))[:120]}",)))
    heads = ("torch", "transformers", "as the zoo says", "not in this version", "otherwise")
    table = [(r.torch, r.transformers, r.good, len(r.absent), len(r.bad)) for r in results]
    print(tabulate(table, heads))
    for result in results:
        for line in (*result.absent, *result.bad):
            print(f"torch {result.torch}, transformers {result.transformers}: {line}")
    return 1 if any(result.bad for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
