"""The shop's database, made from a fixed seed, and the questions about it."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = ["Question", "build", "questions"]

_TABLES = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, joined TEXT);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, category TEXT, price REAL, stock INTEGER);
CREATE TABLE orders (
  id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers (id), placed TEXT, status TEXT
);
CREATE TABLE order_lines (
  order_id INTEGER REFERENCES orders (id), product_id INTEGER REFERENCES products (id), quantity INTEGER
);
"""
_FIRST = ("Ada", "Bruno", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jun", "Kira", "Luis")
_LAST = ("Adler", "Baker", "Costa", "Duval", "Engel", "Fischer", "Garcia", "Haas", "Ito", "Jensen")
_CITIES = ("Athens", "Bergen", "Cairo", "Dakar", "Essen", "Faro", "Graz", "Hanoi", "Izmir", "Jena")
_THINGS = ("lamp", "chair", "desk", "mug", "rug", "clock", "shelf", "vase", "bowl", "stool")
_KINDS = ("oak", "steel", "glass", "wool", "clay", "cork")
_STATES = ("open", "paid", "shipped", "returned")
_SIZES = {"train": 300, "test": 200}


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the query that answers it."""

    id: str
    split: str
    text: str
    sql: str
    target: str


@cache
def build() -> bytes:
    """Return the database in SQLite's file format."""
    draw = random.Random(20_260)
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(_TABLES)
        names = [f"{first} {last}" for first in _FIRST for last in _LAST]
        connection.executemany(
            "INSERT INTO customers VALUES (?, ?, ?, ?)",
            [(n, name, draw.choice(_CITIES), _day(draw, 2020)) for n, name in enumerate(names, start=1)],
        )
        goods = [(f"{kind} {thing}", thing) for kind in _KINDS for thing in _THINGS]
        connection.executemany(
            "INSERT INTO products VALUES (?, ?, ?, ?, ?)",
            [
                (n, name, thing, draw.randint(300, 25_000) / 100, draw.randint(0, 120))
                for n, (name, thing) in enumerate(goods, start=1)
            ],
        )
        orders = range(1, 901)
        connection.executemany(
            "INSERT INTO orders VALUES (?, ?, ?, ?)",
            [(n, draw.randint(1, len(names)), _day(draw, 2024), draw.choice(_STATES)) for n in orders],
        )
        connection.executemany(
            "INSERT INTO order_lines VALUES (?, ?, ?)",
            [
                (n, product, draw.randint(1, 9))
                for n in orders
                for product in draw.sample(range(1, len(goods) + 1), draw.randint(1, 4))
            ],
        )
        connection.commit()
        return connection.serialize()


@cache
def questions() -> tuple[Question, ...]:
    """Return all questions; no row is the subject of both a training question and a held-out one."""
    by_split: dict[str, list[Question]] = {"train": [], "test": []}
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(build())
        for kind, (template, sql, subjects) in _TEMPLATES.items():
            for index, subject in enumerate(subjects(connection)):
                # Two of five subjects of each kind are held out.
                split = "test" if index % 5 in {1, 3} else "train"
                value = connection.execute(sql, subject).fetchone()
                if value is None or value[0] is None:
                    continue
                by_split[split].append(
                    Question(
                        id=f"{kind}-{index}",
                        split=split,
                        text=template.format(*subject),
                        sql=_filled(sql, subject),
                        target=f"{value[0]:.2f}" if isinstance(value[0], float) else str(value[0]),
                    )
                )
    chosen: list[Question] = []
    for split, rows in by_split.items():
        random.Random(split).shuffle(rows)
        chosen.extend(rows[: _SIZES[split]])
    return tuple(chosen)


def _filled(sql: str, subject: tuple[Any, ...]) -> str:
    """Write the values into a query; they come from the shop's own rows, which have no quotes."""
    for value in subject:
        sql = sql.replace("?", str(value) if isinstance(value, int) else f"'{value}'", 1)
    return sql


def _day(draw: random.Random, year: int) -> str:
    return f"{year + draw.randint(0, 1)}-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"


def _pairs(first: str, second: str) -> Callable[[sqlite3.Connection], list[tuple[Any, ...]]]:
    return lambda connection: connection.execute(f"SELECT a.v, b.v FROM ({first}) a, ({second}) b").fetchall()  # noqa: S608 - our own text


def _each(sql: str) -> Callable[[sqlite3.Connection], list[tuple[Any, ...]]]:
    return lambda connection: connection.execute(sql).fetchall()


_CUSTOMER = "SELECT name AS v FROM customers ORDER BY id"
_STATE = "SELECT DISTINCT status AS v FROM orders ORDER BY 1"
_CITY = "SELECT DISTINCT city AS v FROM customers ORDER BY 1"
_THING = "SELECT DISTINCT category AS v FROM products ORDER BY 1"

_TEMPLATES: dict[str, tuple[str, str, Callable[[sqlite3.Connection], list[tuple[Any, ...]]]]] = {
    "orders-of": (
        "How many orders did {0} place?",
        "SELECT count(*) FROM orders o JOIN customers c ON c.id = o.customer_id WHERE c.name = ?",
        _each(_CUSTOMER),
    ),
    "spent-by": (
        "How much are all orders of {0} worth, at the products' prices?",
        (
            "SELECT round(sum(p.price * l.quantity), 2) FROM customers c "
            "JOIN orders o ON o.customer_id = c.id JOIN order_lines l ON l.order_id = o.id "
            "JOIN products p ON p.id = l.product_id WHERE c.name = ?"
        ),
        _each(_CUSTOMER),
    ),
    "sold": (
        "How many pieces of the product {0} were ordered in all?",
        "SELECT sum(l.quantity) FROM order_lines l JOIN products p ON p.id = l.product_id WHERE p.name = ?",
        _each("SELECT name FROM products ORDER BY id"),
    ),
    "city-status": (
        "How many orders from customers in {0} have the status {1}?",
        (
            "SELECT count(*) FROM orders o JOIN customers c ON c.id = o.customer_id "
            "WHERE c.city = ? AND o.status = ?"
        ),
        _pairs(_CITY, _STATE),
    ),
    "dearest": (
        "Which {0} has the highest price?",
        "SELECT name FROM products WHERE category = ? ORDER BY price DESC LIMIT 1",
        _each(_THING),
    ),
    "category-city": (
        "How many pieces of the category {0} went to customers in {1}?",
        (
            "SELECT coalesce(sum(l.quantity), 0) FROM order_lines l JOIN products p ON p.id = l.product_id "
            "JOIN orders o ON o.id = l.order_id JOIN customers c ON c.id = o.customer_id "
            "WHERE p.category = ? AND c.city = ?"
        ),
        _pairs(_THING, _CITY),
    ),
    "lines-of": (
        "How many pieces does order {0} have in all?",
        "SELECT sum(quantity) FROM order_lines WHERE order_id = ?",
        _each("SELECT id FROM orders WHERE id % 5 = 0 ORDER BY id"),
    ),
}
"""Text, query and subjects for each kind of question."""
