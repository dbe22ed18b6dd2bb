"""What stands for a product of settings in a session of tests has every combination of a few of
them.
"""

from itertools import combinations, product

import pytest
from covering import cases, covering

FACTORS = {
    "depth": (1, 2, 4),
    "kept": ("all", "some", "none"),
    "tied": (False, True),
    "dropout": (0.0, 0.1),
}


@pytest.mark.parametrize("strength", [2, 3])
def test_cases_have_every_combination_of_so_many_factors(strength: int) -> None:
    chosen = covering(FACTORS, strength)
    for names in combinations(FACTORS, strength):
        found = {tuple(case[name] for name in names) for case in chosen}
        assert found == set(product(*(FACTORS[name] for name in names)))
    assert len(chosen) < len(cases(FACTORS)) == 36
