# Short names for the scripts of the project.

# What training needs, in .venv; `just install --dev` also what the tests need.
install *options:
    bash scripts/setup.sh {{options}}

# Lint, and the fast tests, by the seconds in tests/slow.txt.
check *arguments:
    bash scripts/lint.sh
    OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 2 --dist worksteal -m "not slow" {{arguments}}

# All tests, or those that are named.
test *arguments:
    bash scripts/test.sh {{arguments}}
