"""A small world of people, companies and towns, written as pages; the questions about it; and its search."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

__all__ = ["Index", "Page", "World", "index", "questions", "world"]

_SYLLABLES = ("ka", "ro", "mi", "ten", "lu", "va", "sor", "ne", "dri", "po", "gal", "be", "ush", "or", "fen")
_TRADES = ("engineer", "baker", "accountant", "designer", "chemist", "driver", "translator", "nurse")
_GOODS = ("lamps", "bicycles", "paper", "cheese", "clocks", "ropes", "glass", "boats", "seeds", "bricks")
_RIVERS = ("Alm", "Bresk", "Corva", "Delm", "Ester", "Forn", "Gaude", "Holv")
_SIZES = {"train": 900, "test": 300}
_TOWNS, _COMPANIES, _PEOPLE = 200, 400, 1_500
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Page:
    """One page of the corpus."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class World:
    """The facts from which pages and questions are written, by name."""

    employer: Mapping[str, str]
    """Company of each person."""
    head_office: Mapping[str, str]
    """Town of each company."""
    founded: Mapping[str, int]
    population: Mapping[str, int]
    pages: Sequence[Page]


@cache
def world() -> World:
    """Make the world, which is the same on every machine."""
    draw = random.Random(20_261)
    names = _names(draw)
    towns = [next(names) for _ in range(_TOWNS)]
    companies = [
        f"{next(names)} {draw.choice(('Works', 'Mills', 'Brothers', 'Union'))}" for _ in range(_COMPANIES)
    ]
    people = [f"{next(names)} {next(names)}" for _ in range(_PEOPLE)]
    made = World(
        employer={person: draw.choice(companies) for person in people},
        head_office={company: draw.choice(towns) for company in companies},
        founded={company: draw.randrange(1850, 2020) for company in companies},
        population={town: draw.randrange(2_000, 900_000) for town in towns},
        pages=[],
    )
    pages = [
        *(_page_of_town(draw, town, made) for town in towns),
        *(_page_of_company(draw, company, made) for company in companies),
        *(_page_of_person(draw, person, made) for person in people),
    ]
    return World(made.employer, made.head_office, made.founded, made.population, pages)


def _names(draw: random.Random) -> Iterator[str]:
    """Yield names without end, each once."""
    seen: set[str] = set()
    while True:
        name = "".join(draw.choices(_SYLLABLES, k=draw.choice((3, 4)))).capitalize()
        if name not in seen:
            seen.add(name)
            yield name


def _page_of_town(draw: random.Random, town: str, made: World) -> Page:
    return Page(
        town,
        f"{town} is a town on the river {draw.choice(_RIVERS)}. It has {made.population[town]} inhabitants. "
        f"Its market is held on the {draw.randrange(1, 29)}th of each month.",
    )


def _page_of_company(draw: random.Random, company: str, made: World) -> Page:
    return Page(
        company,
        f"{company} is a company that makes {draw.choice(_GOODS)}. "
        f"It was founded in {made.founded[company]}. "
        f"Its head office is in {made.head_office[company]}.",
    )


def _page_of_person(draw: random.Random, person: str, made: World) -> Page:
    return Page(
        person,
        f"{person}, born in {draw.randrange(1940, 2000)}, is a {draw.choice(_TRADES)}. "
        f"{person} works for {made.employer[person]}.",
    )


@cache
def questions(split: str) -> Sequence[Mapping[str, object]]:
    """Return the questions of a split; no person is in two of them."""
    made = world()
    draw = random.Random(20_262)
    people = draw.sample(sorted(made.employer), sum(_SIZES.values()))
    rows = [_question(number, person, made) for number, person in enumerate(people)]
    first = _SIZES["train"]
    return rows[:first] if split == "train" else rows[first:]


def _question(number: int, person: str, made: World) -> dict[str, object]:
    company = made.employer[person]
    town = made.head_office[company]
    kinds = (
        (f"In which town is the head office of the company that {person} works for?", town),
        (f"In which year was the company that {person} works for founded?", str(made.founded[company])),
        (
            f"How many inhabitants has the town with the head office of the company that {person} works for?",
            str(made.population[town]),
        ),
    )
    text, target = kinds[number % len(kinds)]
    return {"id": f"question-{number}", "question": text, "target": target}


class Index:
    """Ranks pages by BM25 (Robertson and Zaragoza 2009, equation 3.15, with k1 = 1.2 and b = 0.75)."""

    def __init__(self, pages: Sequence[Page]) -> None:
        self._pages = pages
        counts = [Counter(_words(f"{page.title} {page.text}")) for page in pages]
        lengths = [sum(count.values()) for count in counts]
        mean = sum(lengths) / len(lengths)
        in_pages = Counter(word for count in counts for word in count)
        self._weights: dict[str, list[tuple[int, float]]] = {}
        """For each word, the pages that have it, and what it adds to their score."""
        for number, count in enumerate(counts):
            scale = 1.2 * (0.25 + 0.75 * lengths[number] / mean)
            for word, times in count.items():
                rarity = math.log(1 + (len(pages) - in_pages[word] + 0.5) / (in_pages[word] + 0.5))
                weight = rarity * times * 2.2 / (times + scale)
                self._weights.setdefault(word, []).append((number, weight))

    def search(self, query: str, most: int) -> list[Page]:
        """Return the best pages, at most so many; a page without any word of the query is not among them."""
        scores: dict[int, float] = {}
        for word in set(_words(query)):
            for number, weight in self._weights.get(word, ()):
                scores[number] = scores.get(number, 0.0) + weight
        best = sorted(scores, key=lambda number: (-scores[number], number))[:most]
        return [self._pages[number] for number in best]


@cache
def index() -> Index:
    """Return the index of all pages."""
    return Index(world().pages)


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]
