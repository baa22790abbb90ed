"""A tool: a typed function, what the model is told of it, right and wrong calls, and its check.

python examples/tool.py
"""

import asyncio
import json
from typing import Literal

import agentenv as ae
from agentenv.testing import check_tool

PRICES = {"pen": 1.5, "book": 12.0}


@ae.tool
def price(item: str, count: int = 1, currency: Literal["EUR", "USD"] = "EUR") -> str:
    """Tell what something costs.

    Args:
        item: Name of the item.
        count: How many of it.
        currency: In which currency.
    """
    if item not in PRICES:
        raise ae.ToolError(
            f"{item} is not sold here; there are {' and '.join(PRICES)}"
        )  # the model reads this
    return f"{PRICES[item] * count * (1.1 if currency == 'USD' else 1):.2f} {currency}"


async def main() -> None:
    print(json.dumps(price.schema()["function"]["parameters"]["properties"], indent=1))
    for written in (
        '{"item": "pen", "count": "4"}',  # "4" becomes 4
        '{"item": "pen", "currency": "GBP"}',  # refused, with the field named
        '{"item": "lamp"}',  # the tool's own error
    ):
        result = await price.call(written)
        print(f"{written} -> {result.content}{' (an error)' if result.is_error else ''}")
    report = await check_tool(price)
    print(f"checked: {len(report.findings)} checks, {len(report.problems)} problems")


if __name__ == "__main__":
    asyncio.run(main())
