"""The correct modules: each function is one module, and its docstring says what it should do.

A function uses nothing outside itself, and its arguments and results are JSON values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from agentenv_envs.file_edit.inputs import INPUTS

__all__ = ["function_of", "goal_of", "names", "source_of"]


def median(values: list[float]) -> float:
    """Return the middle of the sorted values, or the mean of the two middle ones."""
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def balanced(text: str) -> bool:
    """Tell whether every bracket of ()[]{} in the text is closed by its own kind, in order."""
    pairs = {")": "(", "]": "[", "}": "{"}
    waiting: list[str] = []
    for letter in text:
        if letter in pairs.values():
            waiting.append(letter)
        elif letter in pairs and (not waiting or waiting.pop() != pairs[letter]):
            return False
    return not waiting


def fibonacci(n: int) -> int:
    """Return the n-th Fibonacci number, counting from 0, of which the 0th is 0 and the first 1."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def search(values: list[int], wanted: int) -> int:
    """Return the first index of wanted in the sorted list, or -1."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < len(values) and values[low] == wanted else -1


def words(text: str) -> dict[str, int]:
    """Count the words of a text without regard to case."""
    counts: dict[str, int] = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def runs(text: str) -> list[list[Any]]:
    """Return the run lengths of a text as a list of [letter, count]."""
    found: list[list[Any]] = []
    for letter in text:
        if found and found[-1][0] == letter:
            found[-1][1] += 1
        else:
            found.append([letter, 1])
    return found


def gcd(a: int, b: int) -> int:
    """Return the greatest common divisor of two whole numbers, never negative."""
    while b != 0:
        a, b = b, a % b
    return abs(a)


def primes(limit: int) -> list[int]:
    """Return the primes up to and including the limit."""
    found: list[int] = []
    for number in range(2, limit + 1):
        if all(number % prime != 0 for prime in found):
            found.append(number)
    return found


def digits(number: int, base: int) -> list[int]:
    """Return the digits of a number that is not negative in a base, the highest first."""
    found = [number % base]
    while number >= base:
        number //= base
        found.append(number % base)
    return found[::-1]


def roman(number: int) -> str:
    """Write a number from 1 to 3999 in Roman numerals."""
    values = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]
    names = ["M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"]
    written = ""
    for value, name in zip(values, names, strict=True):
        while number >= value:
            written += name
            number -= value
    return written


def merge(left: list[int], right: list[int]) -> list[int]:
    """Merge two sorted lists into one sorted list."""
    merged: list[int] = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]


def rotate(values: list[int], steps: int) -> list[int]:
    """Move every value `steps` places to the right; those at the end come to the front."""
    if not values:
        return []
    cut = -steps % len(values)
    return values[cut:] + values[:cut]


def transpose(rows: list[list[int]]) -> list[list[int]]:
    """Turn rows into columns."""
    if not rows:
        return []
    return [[row[column] for row in rows] for column in range(len(rows[0]))]


def palindrome(text: str) -> bool:
    """Tell whether the letters and digits of a text read the same backwards, without regard to case."""
    kept = [letter.lower() for letter in text if letter.isalnum()]
    left, right = 0, len(kept) - 1
    while left < right:
        if kept[left] != kept[right]:
            return False
        left += 1
        right -= 1
    return True


def caesar(text: str, shift: int) -> str:
    """Move every lower-case letter a to z on by `shift` places, from z back to a; keep the rest."""
    moved = ""
    for letter in text:
        if "a" <= letter <= "z":
            moved += chr((ord(letter) - ord("a") + shift) % 26 + ord("a"))
        else:
            moved += letter
    return moved


def interval_union(intervals: list[list[int]]) -> list[list[int]]:
    """Join intervals [start, end] that overlap or touch; return them sorted."""
    joined: list[list[int]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return joined


def best_run(values: list[int]) -> int:
    """Return the largest sum of neighbouring values; 0 if all are negative or there are none."""
    best = current = 0
    for value in values:
        current = max(current + value, 0)
        best = max(best, current)
    return best


def chunks(values: list[int], size: int) -> list[list[int]]:
    """Cut a list into pieces of `size`; the last may be shorter."""
    return [values[start : start + size] for start in range(0, len(values), size)]


def unique(values: list[int]) -> list[int]:
    """Return the values in their order, each only once."""
    seen: list[int] = []
    for value in values:
        if value not in seen:
            seen.append(value)
    return seen


def leap(year: int) -> bool:
    """Tell whether a year of the Gregorian calendar is a leap year."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def clock(seconds: int) -> str:
    """Write a number of seconds as H:MM:SS."""
    hours, rest = seconds // 3600, seconds % 3600
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def second_largest(values: list[int]) -> int | None:
    """Return the second largest of the different values, or None if there are fewer than two."""
    largest = second = None
    for value in values:
        if largest is None or value > largest:
            largest, second = value, largest
        elif value != largest and (second is None or value > second):
            second = value
    return second


def moving_average(values: list[float], width: int) -> list[float]:
    """Return the mean of every `width` neighbouring values."""
    starts = range(len(values) - width + 1)
    return [sum(values[start : start + width]) / width for start in starts]


def anagrams(texts: list[str]) -> list[list[str]]:
    """Group words made of the same letters; groups and words stay in the order of first sight."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault("".join(sorted(text)), []).append(text)
    return list(groups.values())


def collatz(number: int) -> int:
    """Count the steps to 1: half of an even number, three times an odd one plus 1."""
    steps = 0
    while number > 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps


def spiral(rows: list[list[int]]) -> list[int]:
    """Return the values of a table in a spiral: the top row first, then clockwise inwards."""
    left = [row[:] for row in rows]
    found: list[int] = []
    while left:
        found += left.pop(0)
        left = [list(row) for row in zip(*left, strict=True)][::-1]
    return found


def change(amount: int, coins: list[int]) -> int:
    """Return the smallest number of coins that make the amount, or -1 if none do."""
    fewest = [0] + [-1] * amount
    for part in range(1, amount + 1):
        for coin in coins:
            if coin <= part and fewest[part - coin] >= 0:
                count = fewest[part - coin] + 1
                if fewest[part] < 0 or count < fewest[part]:
                    fewest[part] = count
    return fewest[amount]


def distance(a: str, b: str) -> int:
    """Return how many letters must be put in, taken out or changed to make one text the other."""
    row = list(range(len(b) + 1))
    for i in range(1, len(a) + 1):
        above, row[0] = row[0], i
        for j in range(1, len(b) + 1):
            changed = above + (a[i - 1] != b[j - 1])
            above = row[j]
            row[j] = min(row[j] + 1, row[j - 1] + 1, changed)
    return row[len(b)]


def flood(rows: list[str]) -> int:
    """Count the islands of # in a map; neighbours stand above, below, left and right."""
    land = {(y, x) for y, row in enumerate(rows) for x, spot in enumerate(row) if spot == "#"}
    islands = 0
    while land:
        islands += 1
        edge = [land.pop()]
        while edge:
            y, x = edge.pop()
            for spot in [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]:
                if spot in land:
                    land.remove(spot)
                    edge.append(spot)
    return islands


def evaluate(words: list[str]) -> int:
    """Work out an expression in reverse Polish notation with + - and *."""
    stack: list[int] = []
    for word in words:
        if word not in {"+", "-", "*"}:
            stack.append(int(word))
            continue
        right, left = stack.pop(), stack.pop()
        stack.append(left + right if word == "+" else left - right if word == "-" else left * right)
    return stack[0]


def steps_up(heights: list[int]) -> int:
    """Return the length of the longest stretch in which every height is above the one before."""
    longest = length = min(len(heights), 1)
    for place in range(1, len(heights)):
        length = length + 1 if heights[place] > heights[place - 1] else 1
        longest = max(longest, length)
    return longest


def wrap(text: str, width: int) -> list[str]:
    """Break a text at spaces into lines of at most `width` letters; a longer word has its own line."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


def order(needs: dict[str, list[str]]) -> list[str]:
    """Order the names so that each stands after all it needs; first by name where both fit."""
    done: list[str] = []
    while len(done) < len(needs):
        free = [name for name in sorted(needs) if name not in done and all(n in done for n in needs[name])]
        if not free:
            return []
        done.append(free[0])
    return done


def histogram(values: list[int], width: int) -> dict[str, int]:
    """Count values in bins of `width`, named by their lowest value."""
    bins: dict[str, int] = {}
    for value in sorted(values):
        low = str(value // width * width)
        bins[low] = bins.get(low, 0) + 1
    return bins


def polynomial(factors: list[int], x: int) -> int:
    """Return the value at x of a polynomial whose factors are given, the highest power first."""
    value = 0
    for factor in factors:
        value = value * x + factor
    return value


def compare_versions(a: str, b: str) -> int:
    """Compare versions such as 1.10.2 by their numbers: -1, 0 or 1; missing parts are 0."""
    left, right = [int(part) for part in a.split(".")], [int(part) for part in b.split(".")]
    while len(left) < len(right):
        left.append(0)
    while len(right) < len(left):
        right.append(0)
    return (left > right) - (left < right)


def names() -> list[str]:
    """Return the names of all exercises, in a fixed order."""
    return sorted(INPUTS)


def function_of(name: str) -> Callable[..., Any]:
    """Return the correct function."""
    return globals()[name]


def source_of(name: str) -> str:
    """Return the source text of the correct module."""
    annotations = "from __future__ import annotations\n\nfrom typing import Any\n\n\n"
    return annotations + inspect.getsource(function_of(name))


def goal_of(name: str) -> str:
    """Return what the function should do, for the prompt."""
    return f"{name}: {inspect.getdoc(function_of(name))}"
