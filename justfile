# Short names for the scripts of the project.

# What training needs, in .venv; `just install --dev` also what the tests need.
install *options:
    bash scripts/setup.sh {{options}}

# All tests, or those that are named.
test *arguments:
    bash scripts/test.sh {{arguments}}
