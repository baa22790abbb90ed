"""Random conversations, edited at random places, are matched as an oracle matches that compares everything."""

from __future__ import annotations

import json
from copy import deepcopy

from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.endpoint import Node, ReplyTree

TEXTS = ["", "a", " a ", "b\n", "é"]
ARGUMENTS = ['{"a": 1, "b": 2}', '{"b": 2,  "a": 1.0}', '{"a": 1}', "{}", "", "no json", '{"a": true}']
TOOLS = [[], [{"type": "function", "function": {"name": "f"}}]]

calls = st.builds(
    lambda id, name, arguments: {
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    },
    st.sampled_from("xy"),
    st.sampled_from("fg"),
    st.sampled_from(ARGUMENTS),
)
replies = st.builds(
    lambda text, thinking, made: {
        "role": "assistant",
        "content": text,
        **({"reasoning_content": thinking} if thinking else {}),
        **({"tool_calls": made} if made else {}),
    },
    st.sampled_from(TEXTS),
    st.sampled_from(["", "hm", "so"]),
    st.lists(calls, max_size=2),
)
others = st.builds(
    lambda role, text, id: {
        "role": role,
        "content": text,
        **({"tool_call_id": id} if role == "tool" else {}),
    },
    st.sampled_from(["user", "tool", "system"]),
    st.sampled_from(TEXTS),
    st.sampled_from("xy"),
)
steps = st.lists(
    st.tuples(
        st.integers(0, 1),  # tools
        st.integers(0, 30),  # conversation to go on from
        st.lists(others, min_size=1, max_size=2),
        replies,
        st.sampled_from(["same", "plain", "no thinking", "no text", "cut", "foreign", "changed"]),
        st.integers(0, 30),  # place of the change
    ),
    min_size=1,
    max_size=12,
)


def arguments(text):
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return "raw", text
    # json.dumps tells 1 from true, which Python does not.
    return "json", json.dumps(
        {
            key: int(item) if type(item) is float and item == int(item) else item
            for key, item in value.items()
        },
        sort_keys=True,
    )


def fields(made):
    return made["id"], made["function"]["name"], arguments(made["function"]["arguments"])


def is_same(sent, returned, *, by_model):
    """Whether a returned message is the one that was sent, field by field.

    Only the model's own thinking, and its own text beside calls, is compared: nobody knows who wrote others.
    """
    if sent["role"] != returned["role"]:
        return False
    if sent["role"] != "assistant":
        return sent["content"] == returned["content"] and sent.get("tool_call_id") == returned.get(
            "tool_call_id"
        )
    thinking = returned.get("reasoning_content", "")
    made, back = sent.get("tool_calls", []), returned.get("tool_calls", [])
    text = returned["content"].strip()
    dropped = bool(back) and (not text or not by_model)
    return (
        (dropped or sent["content"].strip() == text)
        and (not thinking or not by_model or thinking == sent.get("reasoning_content", ""))
        and sorted(map(fields, made)) == sorted(map(fields, back))
    )


def is_recorded(recorded, tools, path):
    """Whether the last message of a conversation is a reply of the model."""
    return any(
        own == tools
        and len(other) == len(path)
        and all(is_same(*pair, by_model=False) for pair in zip(other, path, strict=True))
        for own, other in recorded
    )


def oracle(recorded, tools, messages):
    """Return the numbers of all replies that the deepest recorded beginning of the messages may end with."""
    for size in range(len(messages), 0, -1):
        if messages[size - 1]["role"] != "assistant":
            continue
        fitting = {
            number
            for number, (own, path) in enumerate(recorded)
            if own == tools
            and len(path) == size
            and all(
                is_same(sent, returned, by_model=is_recorded(recorded, tools, path[: place + 1]))
                for place, (sent, returned) in enumerate(zip(path, messages, strict=False))
            )
        }
        if fitting:
            return size, fitting
    return 0, set()


def unique(reply, number):
    """A reply with call ids that no other reply has, as the session gives them."""
    calls = [{**made, "id": f"{made['id']}{number}"} for made in reply.get("tool_calls", [])]
    return {**reply, **({"tool_calls": calls} if calls else {})}


def changed(messages, how, place):
    """Return the conversation as a client sends it back."""
    messages = deepcopy(messages)
    if not messages or how == "same":
        return messages
    place %= len(messages)
    message = messages[place]
    if how == "plain":
        message["content"] = (
            f"  {message['content'].strip()}\n" if message["role"] == "assistant" else message["content"]
        )
        message.get("tool_calls", []).reverse()
        for call in message.get("tool_calls", []):
            if arguments(call["function"]["arguments"])[0] == "json":
                call["function"]["arguments"] = arguments(call["function"]["arguments"])[1]
    elif how == "no thinking":
        message.pop("reasoning_content", None)
    elif how == "no text":
        message["content"] = "" if message.get("tool_calls") else message["content"]
    elif how == "cut":
        messages = messages[:place]
    elif how == "foreign":
        messages.insert(place, {"role": "assistant", "content": "foreign"})
    elif message["role"] == "assistant":
        message["reasoning_content"] = "changed"
    else:
        message["content"] += "changed"
    return messages


@settings(max_examples=150, deadline=None)
@given(steps)
def test_the_deepest_recorded_reply_is_found(steps):
    tree = ReplyTree()
    recorded = []
    """Tools and conversation, reply included, of each recorded reply, as the clients sent and got them."""
    for tools_index, source, new, said, how, place in steps:
        reply = unique(said, len(recorded))
        tools = TOOLS[tools_index]
        before = recorded[source % len(recorded)][1] if recorded else []
        messages = [*changed(before, how, place), *deepcopy(new)]

        match = tree.find(tools, messages)

        size, fitting = oracle(recorded, tools, messages)
        assert (match.node is not None) == bool(fitting)
        if match.node is not None:
            assert match.node.turn in fitting
            assert match.rest == messages[size:]
        tree.add(match.key, Node(turn=len(recorded), sequence=0, start=0, end=0, reply=reply))
        recorded.append((tools, [*messages, reply]))


@settings(max_examples=50, deadline=None)
@given(steps)
def test_matching_does_not_depend_on_what_was_read_before(steps):
    kept, bare = ReplyTree(), ReplyTree()
    paths = [[]]
    for tools_index, source, new, said, how, place in steps:
        reply = unique(said, len(paths))
        tools = TOOLS[tools_index]
        messages = [*changed(paths[source % len(paths)], how, place), *deepcopy(new)]
        bare._reads.clear()

        found = [tree.find(tools, messages) for tree in (kept, bare)]

        assert found[0].key == found[1].key
        turns = [match.node and match.node.turn for match in found]
        assert turns[0] == turns[1]
        for tree, match in zip((kept, bare), found, strict=True):
            tree.add(match.key, Node(turn=len(paths), sequence=0, start=0, end=0, reply=reply))
        paths.append([*messages, reply])
