"""A wrong name is told with the nearest one and a list that is no longer than a reader wants."""

import pytest

from agentenv.core import UnknownEnvironment, UsageError
from agentenv_worlds.names import check_known


def test_a_known_name_passes_and_a_wrong_one_is_told_with_the_nearest():
    check_known("tau2 has no domain", "retail", ["retail", "airline"])

    with pytest.raises(UnknownEnvironment, match="tau2 has no domain 'retal'") as caught:
        check_known("tau2 has no domain", "retal", ["retail", "airline"])
    assert "did you mean 'retail'? there are: retail, airline" in str(caught.value)


def test_of_many_names_the_first_few_are_listed_and_the_error_is_chosen():
    with pytest.raises(UsageError, match=r"there are: 0, 1, 2, 3, 4, \.\.\.") as caught:
        check_known("there is no setting", "x", [str(number) for number in range(130)], UsageError)
    assert not isinstance(caught.value, UnknownEnvironment)
