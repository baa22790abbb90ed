"""The command that writes the table of agreement."""

from helpers.scripts import load_benchmark

OLD = "| math | 500 | 175 | 500 | 2026-11-25 |"


def test_worlds_that_were_not_compared_keep_their_rows_of_the_page():
    agreement = load_benchmark("agreement")
    page = f"# Title\n\n{agreement.MARK}\n{agreement.HEAD}\n{OLD}\n| arc | 1 | 1 | 1 | then |\n\n## Next\n\n| arc | x |\n"
    arc = {"compared": 1500, "rewarded": 20, "differ": ["a"], "cpu_s": 1.0, "date": "2026-11-26"}

    written = agreement.updated(page, {"arc": arc, "crafter": {"not_compared": "no package"}})

    new = "| arc | 1,500 | 20 | 1,499 | 2026-11-26 |"
    assert written == page.replace("| arc | 1 | 1 | 1 | then |", new)
