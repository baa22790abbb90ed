"""The registry: ids, files, modules, plug-ins and JSON."""

import subprocess
import sys
import textwrap
from collections.abc import Iterable
from importlib.metadata import EntryPoint, version

import gymnasium
import pytest

from agentenv.core import RunLimits, UnknownEnvironment, UsageError
from agentenv.envs import EnvRegistry, EnvSpec, ToolEnv, gym_hook, make, register, registry, spec
from agentenv.envs.rewards import Reward


class Hello(ToolEnv):
    """Says hello."""

    def __init__(self, name="you"):
        self.name = name

    def start(self, greeting: str) -> str:
        return f"{greeting} {self.name}"


class Another(ToolEnv):
    """Takes no arguments."""


def first_of(env, **arguments):
    return make(env, **arguments).reset(seed=1)[0][0]["content"]


def short(answer):
    return len(answer) < 10


def greetings():
    return [{"greeting": "Hi"}, {"greeting": "Hello"}]


@pytest.fixture
def hello():
    entry = register(
        "demo/Hello-v0", Hello, tasks=greetings, rewards=[(short, 0.5)], max_turns=3, kwargs={"name": "Bo"}
    )
    yield entry
    registry.remove("demo/Hello-v0")


@pytest.fixture
def env_file(tmp_path):
    before = dict(registry)
    path = tmp_path / "shop.py"
    path.write_text(
        textwrap.dedent("""
            from agentenv.envs import ToolEnv, register

            class Shop(ToolEnv):
                def start(self, price: int) -> str:
                    return f"It costs {price}."

            class Other(Shop):
                pass

            register("file/Shop-v0", Shop, tasks=[{"price": 1}])
        """)
    )
    yield path
    registry.clear()
    registry.update(before)


def test_make_uses_the_specification_and_its_arguments_win(hello):
    assert first_of("demo/Hello-v0").endswith("Bo")
    assert first_of(hello, name="Al").endswith("Al")
    assert make("demo/Hello-v0").unwrapped.env_id == "demo/Hello-v0"
    assert (hello.description, hello.max_turns) == ("Says hello.", 3)
    with pytest.raises(UsageError, match=r"demo/Hello-v0 cannot be made with .*nam"):
        make(hello, nam="x")
    with pytest.raises(UsageError, match="takes no arguments, but was given: digits"):
        EnvSpec.of("demo/Plain-v0", Another).make(digits=3)
    with pytest.raises(AttributeError):
        hello.id = "other/Name-v0"
    with pytest.raises(TypeError):
        hello.kwargs["name"] = "x"


@pytest.mark.parametrize("given", ["two", None, [2], 2.5])
def test_arguments_of_another_type_than_the_class_declares_are_refused_before_anything_is_played(given):
    class Sized(ToolEnv):
        def __init__(self, size: int, seeds: Iterable[int] = ()): ...

    seeds = iter([1, 2])
    entry = register("demo/Sized-v0", Sized, tasks=[{}], override=True)

    entry.with_kwargs({"size": 2, "seeds": seeds}).check_kwargs()
    assert list(seeds) == [1, 2]
    with pytest.raises(UsageError, match=r"demo/Sized-v0 cannot be made: the field 'size' is .*integer"):
        entry.with_kwargs({"size": given}).check_kwargs()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("demo/Helo-v0", "did you mean 'demo/Hello-v0'"),
        ("demo/Hello-v3", "did you mean 'demo/Hello-v0'"),
        ("DEMO/hello-v0", "did you mean 'demo/Hello-v0'"),
        ("shop/Hello-v0", "did you mean 'demo/Hello-v0'"),
        ("nothing/LikeIt-v0", "unknown environment"),
        ("no/file.py", "no file 'no/file.py'"),
        ("no.such.module:Class", "no module and no world 'no.such.module'"),
        ("gymnasium:FrozenLak-v1", "FrozenLake"),
    ],
)
def test_an_unknown_id_suggests_the_nearest(hello, wrong, words):
    with pytest.raises(UnknownEnvironment, match=words):
        spec(wrong)


@pytest.mark.parametrize("wrong", ["Hello-v0", "demo/Hello", "demo/He llo-v0", "a/b/C-v0", ""])
def test_a_malformed_id_is_refused(wrong):
    with pytest.raises(UsageError, match="namespace/Name-v0"):
        register(wrong, Hello)


def test_an_id_is_not_taken_twice_by_different_environments(hello):
    register("demo/Hello-v0", Hello, tasks=greetings)
    with pytest.raises(UsageError, match="registered already"):
        register("demo/Hello-v0", Another)
    register("demo/Hello-v0", Another, override=True)
    assert spec("demo/Hello-v0").attribute.endswith("Another")


def test_a_specification_survives_json(hello):
    again = EnvSpec.from_json(hello.to_json())

    assert again == hello
    assert again.to_json() == hello.to_json()
    assert make(again).reset(seed=1) == make(hello).reset(seed=1)
    assert again.rewards == (Reward(short, 0.5),)


def test_what_no_file_can_name_is_refused_as_json():
    class Local(ToolEnv):
        pass

    with pytest.raises(UsageError, match="inside a function"):
        EnvSpec.of("demo/Local-v0", Local).to_json()
    with pytest.raises(UsageError, match="lambda"):
        EnvSpec.of("demo/Hello-v0", Hello, rewards=[lambda answer: 1.0]).to_json()
    with pytest.raises(UsageError, match="not the specification of an environment"):
        EnvSpec.from_json('{"id": "x"}')


def test_max_turns_and_limits_are_merged_to_the_stricter():
    limits = RunLimits(max_turns=9, max_tool_calls=2)

    assert EnvSpec.of("d/A-v0", Hello, limits=limits, max_turns=4).limits.max_turns == 4
    assert EnvSpec.of("d/A-v0", Hello, limits=limits, max_turns=12).limits.max_turns == 9
    assert EnvSpec.of("d/A-v0", Hello, max_turns=4).limits.stricter(RunLimits()).max_turns == 4
    assert EnvSpec.of("d/A-v0", Hello, max_turns=4).limits.stricter(RunLimits()) == RunLimits(max_turns=4)


def test_a_file_is_an_id_and_is_read_again_when_it_changed(env_file):
    for part, name in {"": "file/Shop-v0", ":Shop": "file/Shop-v0", ":file/Shop-v0": "file/Shop-v0"}.items():
        assert spec(f"{env_file}{part}").id == name
    assert spec(f"{env_file}:Other").id == "local/Other-v0"
    assert spec("agentenv_envs.calculator:Calculator").id == "agentenv/Calculator-v0"
    assert first_of(str(env_file)) == "It costs 1."
    with pytest.raises(UnknownEnvironment, match="did you mean 'Shop'"):
        spec(f"{env_file}:Shopp")

    env_file.write_text(env_file.read_text().replace("It costs", "Price"))
    assert first_of(str(env_file)) == "Price 1."

    env_file.write_text(env_file.read_text() + 'register("file/Other-v0", Other)\n')
    with pytest.raises(UnknownEnvironment, match="file/Other-v0"):
        spec(str(env_file))

    borrowed = "from agentenv.envs import register\nfrom agentenv_envs.calculator import Calculator\n"
    env_file.write_text(borrowed + "register('file/Borrowed-v0', Calculator, tasks=[{}])\n")
    assert spec(str(env_file)).id == spec(f"{env_file}:Calculator").id == "file/Borrowed-v0"


def plugin(monkeypatch, **points):
    found = EnvRegistry()
    names = {name: EntryPoint(name, value, "agentenv.envs") for name, value in points.items()}
    monkeypatch.setattr(found, "_points", names)
    return found


@pytest.mark.parametrize(
    ("requires", "needs"),
    [
        ("Requires-Dist: no-such-package; extra == 'games'", "pip install 'shop-envs[games]'"),
        ('Requires-Dist: pydantic[email]==0.0.1 ; extra == "games"', "pip install 'shop-envs[games]'"),
        ("Requires-Dist: pydantic>=1; extra == 'games'", ""),
        (f"Requires-Dist: pydantic=={version('pydantic')}; extra == 'games'", ""),
        ("Requires-Dist: no-such-package; extra == 'other'", ""),
        ("Requires-Dist: no-such-package", ""),
    ],
)
def test_what_an_environment_needs_besides_its_package_is_listed(tmp_path, monkeypatch, requires, needs):
    info = tmp_path / "shop_envs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: shop-envs\nVersion: 1.0\n{requires}\n")
    (info / "entry_points.txt").write_text("[shop.test]\nshop/Chess-v0 = shop.chess:Chess [games]\n")
    monkeypatch.syspath_prepend(tmp_path)

    [row] = EnvRegistry("shop.test").listing()

    assert (row.name, row.origin, row.needs) == ("shop/Chess-v0", "shop-envs", needs)


def test_a_broken_plugin_is_listed_with_its_error_and_disturbs_no_other(monkeypatch):
    found = plugin(
        monkeypatch,
        **{"x/Gone-v0": "no_such_package.envs:Env", "x/Fine-v0": "agentenv_envs.calculator:Calculator"},
    )

    before = found.listing()
    loaded = {row.name: row for row in found.listing(load=True)}

    assert [row.name for row in before] == ["x/Fine-v0", "x/Gone-v0"]
    assert all(row.item is None and not row.error for row in before)
    assert "no_such_package" in loaded["x/Gone-v0"].error
    assert loaded["x/Fine-v0"].item.id == "x/Fine-v0"
    with pytest.raises(UnknownEnvironment, match="cannot be loaded: ModuleNotFoundError"):
        found["x/Gone-v0"]


def test_an_installed_environment_that_was_removed_comes_back_whole():
    before = spec("agentenv/Calculator-v0")
    registry.remove("agentenv/Calculator-v0")

    assert spec("agentenv/Calculator-v0") == before
    assert spec("agentenv/Calculator-v0").max_turns == 3


@pytest.mark.parametrize(
    "lines",
    [
        "from agentenv import gym_hook; gym_hook.install(); import gymnasium",
        "import gymnasium; from agentenv import gym_hook; gym_hook.install()",
    ],
)
def test_gymnasium_makes_our_environments_whatever_is_imported_first(lines):
    code = (
        f"{lines}; env = gymnasium.make('agentenv/Calculator-v0'); print(env.reset(seed=1)[0][-1]['content'])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("What is")


def test_environments_registered_later_reach_gymnasium_too(hello):
    gym_hook.install()
    register("demo/Later-v0", Hello, tasks=greetings)
    try:
        env = gymnasium.make("demo/Later-v0", name="Cy")
        vector = gymnasium.make_vec("demo/Later-v0", 2, "sync")
        assert env.reset(seed=1)[0][0]["content"].endswith("Cy")
        assert len(vector.reset(seed=1)[0]) == 2
    finally:
        registry.remove("demo/Later-v0")
        gymnasium.registry.pop("demo/Later-v0")
        gymnasium.registry.pop("demo/Hello-v0", None)


def test_a_file_that_another_one_imports_is_the_same_module(env_file, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    file, other = env_file.rename(env_file.with_name("desk_of_two.py")), env_file.with_name("other.py")
    other.write_text("from desk_of_two import Shop\nclass Mine(Shop):\n    pass\n")

    first = spec(str(file))

    assert issubclass(spec(f"{other}:Mine").load(), first.load())
