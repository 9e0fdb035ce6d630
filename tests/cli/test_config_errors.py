"""Settings that were refused: the one key that is wrong, its value, and what is allowed there."""

import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from jsonargparse import ActionConfigFile, ArgumentError

from grpo_lightning.cli.app import Parser
from grpo_lightning.cli.config_errors import explain
from grpo_lightning.cli.sources import Source, read


@dataclass
class Color:
    shade: Literal["dark", "light"] = "dark"
    depth: int = 1


class Base:
    pass


class Brush(Base):
    def __init__(self, width: float = 1.0, color: Color | None = None):
        pass


class Pencil(Base):
    def __init__(self, rate: float = 1.0):
        pass


class Rule(ABC):
    """As `Reward`: abstract, and a list of rules also takes functions of any kind."""

    @abstractmethod
    def __call__(self):
        pass


class Strict(Rule):
    def __init__(self, extract: str = "auto"):
        pass

    def __call__(self):
        pass


class Bare(Rule):
    def __call__(self):
        pass


class Weighted(Rule):
    def __init__(self, rule: Rule | Callable[..., Any], weight: float = 1.0):
        pass

    def __call__(self):
        pass


def prepare():
    pass


def brief(completions: list, **columns):
    """As a reward function; with an annotation, the parser itself refuses a missing argument."""


class Factory:
    def __init__(self, params: list, rate: float = 0.1):
        pass


@pytest.fixture
def parser(monkeypatch):
    monkeypatch.setitem(sys.modules, "paints", sys.modules[__name__])
    parser = Parser(exit_on_error=False)
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_argument("--model.count", type=int, default=1, help="How many.")
    parser.add_argument("--model.name", type=str, required=True, help="Who it is,\nor who it was. More.")
    parser.add_argument("--model.color", type=Color | None, default=None)
    parser.add_argument("--model.brushes", type=list[Base | Callable[..., float]])
    parser.add_argument("--model.factory", type=Callable[[list], Factory], default={"class_path": "paints.Factory"})
    parser.add_argument("--model.base", type=Base | None, default=None)
    parser.add_argument("--model.either", type=Base | Rule | None, default=None)
    parser.add_argument("--model.rule", type=Rule | None, default=None)
    parser.add_argument("--data.rows", type=list[Color] | str, default="")
    parser.add_argument("--model.title", type=str | None, default=None)
    parser.add_argument("--model.rules", type=list[Rule | Callable[..., Any]])
    parser.add_argument("--model.tools", type=list[Base] | Base | None, default=None)
    parser.add_argument("--model.weights", type=list[float] | None, default=None)
    parser.add_argument("--model.offload", type=list[Literal["reference", "optimizer"]] | None, default=None)
    parser.add_argument("--data.prepare", type=Callable[[], str] | None, default=None)
    parser.add_argument("--data.columns", type=list[int | str] | None, default=None)
    parser.add_argument("--precision", type=Literal[64, 32] | Literal["16-mixed"] | None, default=None)
    parser.add_argument("--seed", type=int | None, default=None)
    return parser


def found(parser, **tree):
    with pytest.raises(ArgumentError) as error:
        parser.parse_args(["--config", json.dumps(tree), "--model.name=x"])
    sources = [Source("in r.yaml", {"seed": 1}), Source("in s.yaml", tree)]
    return explain(error.value.message, parser.keys(), sources)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (
            {"model": {"cuont": 1}},
            "there is no key model.cuont. Did you mean model.count?\nKeys of model: base, brushes, col",
        ),
        (
            {"models": {"a": 1}},
            "there is no key models. Did you mean model?\nKeys: config, data, model, precision, seed.",
        ),
        ({"count": 1}, "there is no key count. Did you mean model.count?"),
        ({"model": {"seed": 1}}, "there is no key model.seed. Did you mean seed?"),
        ({"model": {"count": "x"}}, "model.count must be a whole number, got 'x'."),
        ({"seed": 1.5}, "seed must be a whole number or null, got 1.5."),
        ({"model": {"color": {"shade": "red"}}}, "model.color.shade must be one of dark, light, got 'red'."),
        ({"model": {"color": {"shad": "dark"}}}, "model.color.shad. Did you mean model.color.shade?"),
        ({"model": {"color": 3}}, "model.color must be Color or null, got 3."),
        ({"model": {"count": [1]}}, "model.count must be a whole number, got [1]."),
        ({"model": {"brushes": ["nowhere.f"]}}, "model.brushes[0]: there is no module 'nowhere' for nowhere.f"),
        ({"model": {"brushes": ["paints.Brsh"]}}, "paints has no 'Brsh'. Did you mean paints.Brush?"),
        (
            {"model": {"base": "BRUSH"}},
            "'BRUSH' is neither an import path nor a name of the package. Did you mean Brush?",
        ),
        ({"model": {"brushes": ["Brsh"]}}, "model.brushes[0]: 'Brsh' is neither an import path"),
        ({"model": {"brushes": [{"class_path": "paints.Brush", "init_args": {"widthh": 1}}]}}, "init_args.widthh. Did"),
        ({"model": {"brushes": [{"class_path": "paints.Brush", "args": {}}]}}, "no key model.brushes[0].args."),
        (
            {"model": {"brushes": [{"class_path": "paints.Brush", "init_args": {"color": {"depth": "x"}}}]}},
            "model.brushes[0].init_args.color.depth must be a whole number, got 'x'.",
        ),
        (
            {"model": {"brushes+": {"class_path": "paints.Brush", "init_args": {"width": "x"}}}},
            "width must be a number",
        ),
        ({"model": {"factory": {"raet": 1}}}, "no key model.factory.raet. Did you mean model.factory.rate?"),
        (
            {"model": {"factory": {"init_args": {"rate": "x"}}}},
            "model.factory.init_args.rate must be a number, got 'x'.",
        ),
    ],
)
def test_the_key_is_named(parser, tree, said):
    text = found(parser, **tree)
    assert text.startswith("s.yaml: ")
    assert said in text
    assert len(text) < 400


BELONG = "Arguments of {} belong in init_args."


@pytest.mark.parametrize(
    ("rule", "key", "kind"),
    [
        ({"class_path": "Strict", "extract": "boxed"}, "extract", "Strict"),
        ({"class_path": "paints.Strict", "extract": "boxed"}, "extract", "Strict"),
        ({"class_path": "Strict", "init_arg": {"extract": "boxed"}}, "init_arg", "Strict"),
        (
            {"class_path": "Weighted", "init_args": {"rule": {"class_path": "Strict", "extract": "boxed"}}},
            "init_args.rule.extract",
            "Strict",
        ),
        ({"class_path": "Weighted", "weight": 2, "init_args": {"rule": {"class_path": "Bare"}}}, "weight", "Weighted"),
    ],
)
@pytest.mark.parametrize("key_of_list", ["rules", "rules+"])
def test_an_argument_next_to_class_path_is_named(parser, rule, key, kind, key_of_list):
    text = found(parser, model={key_of_list: [{"class_path": "Bare"}, rule]})
    assert text.startswith(f"s.yaml: there is no key model.rules[1].{key}.")
    assert text.endswith(
        f"Keys of {f'model.rules[1].{key}'.rpartition('.')[0]}: class_path, dict_kwargs, init_args. "
        + BELONG.format(kind)
    )


def test_an_argument_next_to_the_class_path_of_a_function_is_named(parser):
    text = found(parser, data={"prepare": {"class_path": "paints.Factory", "rate": 1}})
    assert text.startswith("s.yaml: there is no key data.prepare.rate.")
    assert text.endswith(BELONG.format("Factory"))


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        ({"class_path": "paints.prepar"}, "data.prepare.class_path: paints has no 'prepar'. Did you mean paints.pre"),
        ({"class_path": "paints.Fctory", "init_args": {"rate": 1}}, "class_path: paints has no 'Fctory'. Did you mean"),
        ({"class_path": "nowhere.f"}, "data.prepare.class_path: there is no module 'nowhere' for nowhere.f."),
        ("paints.prepar", "data.prepare: paints has no 'prepar'. Did you mean paints.prepare"),
    ],
)
def test_a_typo_in_the_path_of_a_function_is_named(parser, prepare, said):
    text = found(parser, data={"prepare": prepare})
    assert text.startswith("s.yaml: data.prepare")
    assert said in text


@pytest.mark.parametrize("is_mapping", [False, True])
@pytest.mark.parametrize(
    ("key", "kind", "said"),
    [
        ("model.base", "paints.Color", "is not a subclass of Base."),
        ("model.color", "paints.Base", "is not Color, the only class that is allowed."),
        ("data.prepare", "paints.Base", "has no method __call__."),
        ("model.factory", "paints.Base", "is not a subclass of Factory."),
        ("model.rules", "paints.Base", "is not a subclass of Rule and has no method __call__."),
        ("model.either", "paints.Color", "is not a subclass of Base or Rule."),
        ("model.rule", "paints.Rule", "does not define __call__, which its base class requires."),
        ("model.rule", "paints.prepare", "is not annotated to return Rule."),
    ],
)
def test_a_class_of_another_kind_is_named(parser, key, kind, said, is_mapping):
    value, where = ({"class_path": kind}, ".class_path") if is_mapping else (kind, "")
    section, _, name = key.partition(".")
    in_list = "[0]" if name == "rules" else ""
    text = found(parser, **{section: {name: [value] if in_list else value}})
    assert text == f"s.yaml: {key}{in_list}{where}: {kind} {said}"


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"model": {"offload": [None]}}, "model.offload[0] must be one of reference, optimizer, got null."),
        (
            {"model": {"offload": ["reference", "optimiser"]}},
            "model.offload[1] must be one of reference, optimizer, got 'optimiser'. Did you mean optimizer?",
        ),
        ({"model": {"offload": [[1]]}}, "model.offload[0] must be one of reference, optimizer, got [1]."),
        ({"model": {"weights": [1, None]}}, "model.weights[1] must be a number, got null."),
        ({"model": {"weights": [True]}}, "model.weights[0] must be a number, got true."),
        ({"model": {"weights": "x"}}, "model.weights must be a list or null, got 'x'."),
        ({"data": {"columns": [None]}}, "data.columns[0] must be a whole number or text, got null."),
    ],
)
def test_null_is_not_offered_inside_a_list_that_refuses_it(parser, tree, said):
    assert found(parser, **tree) == f"s.yaml: {said}"


@pytest.mark.parametrize(
    ("value", "shown"), [(True, "true"), ([None, 1, "x"], "[null, 1, x]"), ({"a": False}, "{a: false}"), ("x", "'x'")]
)
def test_values_are_shown_as_in_yaml(parser, value, shown):
    assert found(parser, model={"count": value}) == f"s.yaml: model.count must be a whole number, got {shown}."


def test_the_value_of_a_section_is_shown_as_in_yaml(parser):
    text = explain('Parser key "data": Unable to load config', parser.keys(), [Source("in s.yaml", {"data": True})])
    assert text == "s.yaml: data takes settings (key: value) or a file of them, got true."


def test_a_value_that_two_types_allow_is_listed_once(parser):
    parser.add_argument("--model.level", type=Literal[64, 16] | Literal["64", "bf16"], default=64)
    assert found(parser, model={"level": "high"}) == "s.yaml: model.level must be one of 64, 16, bf16, got 'high'."


@pytest.mark.parametrize("value", ["fp16", 17])
def test_the_numbers_that_are_allowed_are_listed(parser, value):
    said = f"precision must be one of 64, 32, 16-mixed or null, got {value!r}."
    assert found(parser, precision=value).startswith(f"s.yaml: {said}")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--model.tools+=paints.Brush", "--model.tools.widthh=1"],
            "there is no key model.tools.widthh. Did you mean model.tools.width?\nKeys of model.tools: color, width.",
        ),
        (["--model.rules+=paints.Bare", "--model.rules.width=1"], "no key model.rules.width. Bare has no arguments."),
    ],
)
def test_an_argument_of_an_appended_object_is_named(parser, flags, said):
    with pytest.raises(ArgumentError) as error:
        parser.parse_args(["--model.name=x", *flags])
    text = explain(error.value.message, parser.keys(), read(flags))
    assert text.startswith("on the command line: there is no key")
    assert said in text


def test_what_must_be_a_list_is_named_and_not_an_equal_item_of_an_earlier_list(parser):
    with pytest.raises(ArgumentError) as error:
        parser.parse_args(["--model.name=x", "--model.rules=paints.Bare"])
    earlier = Source("in r.yaml", {"model": {"rules": ["paints.Bare"]}})
    text = explain(error.value.message, parser.keys(), [earlier, *read(["--model.rules=paints.Bare"])])
    assert text == "on the command line: model.rules must be a list, got 'paints.Bare'."


@pytest.mark.parametrize(
    ("value", "fragment"), [("DAPO", "dapo"), ("dr_grpo", "dr_grpo"), ({"class_path": "Dr.GRPO"}, "dr_grpo")]
)
def test_the_name_of_a_recipe_in_place_of_an_objective_is_told_what_to_write(parser, value, fragment):
    parser.add_argument("--model.objective", type=Base | None, default=None)
    text = found(parser, model={"objective": value})
    assert text.endswith(f"is the name of a recipe: remove this setting, and add --config objectives/{fragment}.")
    assert "a name of the package" in found(parser, model={"objective": "nothing"})
    assert "a name of the package" in found(parser, model={"base": "dapo"})


def test_what_a_factory_is_called_with_is_no_setting(parser):
    assert "Keys of model.factory: rate." in found(parser, model={"factory": {"params": []}})


def test_a_module_that_fails_to_import_is_said_with_its_error(parser, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_paint.py").write_text("\n1 / 0\n")
    (tmp_path / "half_paint.py").write_text("def f(\n")
    (tmp_path / "needy_paint.py").write_text("import not_installed_anywhere\n")
    text = found(parser, model={"brushes": ["broken_paint.f"]})
    where = f"(at {tmp_path / 'broken_paint.py'}:2)"
    assert f"importing broken_paint for broken_paint.f failed: ZeroDivisionError: division by zero {where}." in text
    text = found(parser, model={"brushes": ["half_paint.f"]})
    assert re.search(r"importing half_paint for half_paint.f failed: SyntaxError: .* \(half_paint.py, line 1\)\.", text)
    text = found(parser, model={"brushes": ["needy_paint.f"]})
    assert "needy_paint (for needy_paint.f) imports not_installed_anywhere, which is not installed." in text


def test_the_one_of_several_entries_is_named(parser):
    brush = {"class_path": "paints.Brush", "init_args": {"width": 1.0}}
    wrong = {"class_path": "paints.Pencil", "init_args": {"rate": 1.0, "width": 1.0}}
    assert "no key model.brushes[1].init_args.width." in found(parser, model={"brushes": [brush, wrong]})


def test_missing_keys_are_listed_with_their_purpose(parser):
    with pytest.raises(ArgumentError, match="required") as error:
        parser.parse_args([])
    said = explain(error.value.message, parser.keys(), [])
    assert said.startswith("Required settings are missing:\n  model.name: Who it is, or who it was.\n")


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([{"class_path": "Weighted", "init_args": {"weight": 2}}], "[0].init_args.rule is missing. Weighted req"),
        (["Bare", "Weighted"], "[1].init_args.rule is missing. Weighted requires it. Write init_args: {rule: ...}."),
        (
            [
                {"class_path": "Weighted", "init_args": {"rule": "paints.Bare"}},
                {"class_path": "paints.Weighted", "init_args": {"rule": {"class_path": "Weighted"}}},
            ],
            "[1].init_args.rule.init_args.rule is missing. Weighted requires it. Write init_args: {rule: ...}.",
        ),
    ],
)
def test_a_missing_argument_of_an_object_is_named_with_its_key(parser, rules, said):
    assert found(parser, model={"rules": rules}).startswith(f"s.yaml: model.rules{said}")


@pytest.mark.parametrize("key", ["rules", "rules+"])
def test_a_function_given_as_a_class_is_named_as_a_function(parser, key):
    text = found(parser, model={key: [{"class_path": "Bare"}, {"class_path": "paints.brief"}]})
    assert text.startswith("s.yaml: model.rules[1]: paints.brief is a function: write `- paints.brief`. ")
    inner = {"class_path": "Weighted", "init_args": {"rule": {"class_path": "paints.brief"}}}
    text = found(parser, model={key: [inner]})
    assert text.startswith("s.yaml: model.rules[0].init_args.rule: paints.brief is a function: write `paints.brief`. ")
    assert "it would be called when the run starts, without its argument 'completions'." in text
    assert text.endswith("If this call is meant, write init_args: {completions: ...}.")


def test_a_message_that_is_not_understood_is_shortened(parser):
    message = 'Parser key "model.x":\n  Subtypes: [<class int>]\n' + "\n".join(f"  line {i}" for i in range(20))
    text = explain(message, parser.keys(), [])
    assert text.splitlines() == ["model.x: Subtypes: [<class int>]", *[f"  line {i}" for i in range(5)]]


def test_a_number_that_yaml_reads_as_text_is_right(parser):
    config = parser.parse_args(["--config", json.dumps({"model": {"factory": {"rate": "1e-5"}}}), "--model.name=x"])
    assert config.model.factory.init_args.rate == 1e-5
