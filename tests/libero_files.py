"""A mark for tests that need LIBERO's packages, files or assets."""

from collections.abc import Callable

import pytest

from rlinf.errors import MissingDependencyError


def needs(*functions: Callable[[], object]) -> pytest.MarkDecorator:
    """Skip a test with the message of the first function that raises MissingDependencyError."""
    reason = None
    try:
        for function in functions:
            function()
    except MissingDependencyError as error:
        reason = str(error)
    return pytest.mark.skipif(reason is not None, reason=str(reason))
